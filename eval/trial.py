"""One trial: a workload is built, an engine learns from the fill cases, the others are measured, the pool frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import Progress

from eval.cases.workload import Workload, build
from eval.measure import Conversation, Row, Session, fill, measure, open_case, own_engines, register, sessions_of
from eval.methods.followers import Followers
from eval.methods.registry import Method
from eval.running.setting import Setting
from eval.tasks.base import Problem
from eval.topologies import TOPOLOGIES, Node
from kvcomm import Engine
from kvcomm.errors import InvalidInput, KVCommError

_LEAST = {
    "agents": 1, "rounds": 1, "prompts": 1, "fill_prompts": 0, "prompt_tokens": 1, "answer_tokens": 1, "repeats": 1,
    "seed": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What is measured.

    Attributes:
        prompts, fill_prompts: problems measured, and others that are learned from first.
        prompt_tokens: length of the last agent's prompt.
        answer_tokens: tokens of an answer at most.
        repeats: how often each TTFT is taken.
        fill_by: ``generate``, agents really write the messages that are learned from, or ``prefill``, texts of the task
            stand for them.
        rounds: how often the topology's pattern is gone through.
        own_answers: whether each method also writes the last call's answer by itself, to be scored.

    Raises:
        InvalidInput: an unknown topology or fill_by, or a number below what makes sense.
    """

    topology: str
    agents: int
    prompts: int
    fill_prompts: int
    prompt_tokens: int
    answer_tokens: int
    repeats: int
    seed: int
    fill_by: str
    rounds: int = 1
    own_answers: bool = False

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES or self.fill_by not in ("generate", "prefill"):
            raise InvalidInput(
                f"topology {self.topology!r} must be one of {sorted(TOPOLOGIES)}, and fill-by {self.fill_by!r} "
                "generate or prefill"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise InvalidInput(f"{name.replace('_', '-')} is {value}; give at least {least}")

    def prepare(self, setting: Setting, problems: Sequence[Problem], methods: Mapping[str, Method]) -> Bench:
        """Cut the workload and make the engines; nothing is run yet."""
        workload = build(
            problems,
            partial(TOPOLOGIES[self.topology], rounds=self.rounds),
            setting.tokenizer,
            agents=self.agents,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            measured=self.prompts,
            fill=self.fill_prompts,
            seed=self.seed,
        )
        engine, rounded = setting.engine(), setting.rounded()
        fingerprint = engine.pool.fingerprint
        engine.book = Followers(fingerprint, {n: m.book(fingerprint) for n, m in methods.items() if m.book is not None})
        register(engine, workload)
        register(rounded, workload)
        return Bench(self, workload, engine, rounded, dict(methods), own_engines(engine, methods))


@dataclass
class Bench:
    """A prepared trial. ``learn``, then ``rows``."""

    trial: Trial
    workload: Workload
    engine: Engine
    rounded: Engine
    methods: dict[str, Method]
    engines: dict[str, Engine]

    @property
    def first_agent(self) -> str:
        """The agent that hears nobody; it is outside the means of reuse and closeness."""
        return self.workload.nodes[0].name

    def learn(self) -> Iterator[None]:
        """Learn from the fill cases, one step an agent."""
        yield from fill(self.engine, self.workload, self.trial.fill_by == "generate", list(self.engines.values()))

    def rows(self, rounded_cases: int | None = None) -> Iterator[Row]:
        """Rows of all measured cases.

        Args:
            rounded_cases: for how many cases the bfloat16 yardstick is taken; all of them unless given.

        Raises:
            KVCommError: the pool or the offsets changed meanwhile; the rows are void.
        """
        limit = len(self.workload.measured) if rounded_cases is None else rounded_cases
        with self._frozen():
            for number, case in enumerate(self.workload.measured):
                sessions = sessions_of(self.engine, self.methods, self.engines)
                yield from self._measure(
                    self.workload.nodes,
                    Conversation(case, {}),
                    sessions,
                    self.trial.repeats,
                    self.rounded if number < limit else None,
                )

    def rows_of_hearers(self) -> Iterator[Row]:
        """Rows of the agents that hear others, each method starting from the one dense prefill of the first agent.

        TTFT is taken of the last agent alone. For many methods: what they have in common is run once.

        Raises:
            KVCommError: as rows.
        """
        nodes = self.workload.nodes
        with self._frozen():
            for case in self.workload.measured:
                talk = Conversation(case, {})
                opened = open_case(self.engine, self.workload, talk)
                sessions = sessions_of(opened, self.methods, self.engines)
                alone = {name: session for name, session in sessions.items() if name in self.engines}
                for _ in self._measure(nodes[:1], Conversation(case, {}), alone, 0, None):
                    pass  # these do not read the opened engine's pool and begin by themselves
                yield from self._measure(nodes[1:-1], talk, sessions, 0, self.rounded)
                yield from self._measure(nodes[-1:], talk, sessions, self.trial.repeats, self.rounded)

    def _measure(
        self,
        nodes: Sequence[Node],
        talk: Conversation,
        sessions: Mapping[str, Session],
        repeats: int,
        rounded: Engine | None,
    ) -> Iterator[Row]:
        return measure(self.engine, nodes, talk, sessions, self.workload.answer_tokens, repeats, rounded, self._writes)

    @property
    def _writes(self) -> str:
        return self.workload.nodes[-1].name if self.trial.own_answers else ""

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        before = self._digests()
        yield
        if self._digests() != before:
            raise KVCommError("the pool changed while it was measured; the figures are void")

    def run(self, progress: Progress, name: str) -> list[Row]:
        """Learn, and measure all agents, under a progress bar."""
        self._learn(progress, name)
        return self._collect(progress, name, self.rows(), len(self.workload.nodes))

    def run_hearers(self, progress: Progress, name: str) -> list[Row]:
        """Learn, and measure the agents that hear others, under a progress bar."""
        self._learn(progress, name)
        return self._collect(progress, name, self.rows_of_hearers(), len(self.workload.nodes) - 1)

    def _learn(self, progress: Progress, name: str) -> None:
        step = progress.add_task(f"{name}: learning", total=len(self.workload.fill) * len(self.workload.nodes))
        for _ in self.learn():
            progress.advance(step)

    def _collect(self, progress: Progress, name: str, rows: Iterator[Row], nodes: int) -> list[Row]:
        total = len(self.workload.measured) * nodes * (len(self.methods) + 1)
        step = progress.add_task(f"{name}: measuring", total=total)
        found = []
        for row in rows:
            found.append(row)
            progress.advance(step)
        return found

    def facts(self) -> dict[str, Any]:
        """What was learned from and how much memory it took, for the output."""
        return {
            "pool_digest": self._digests()[0],
            "pool_bytes": self.engine.pool.nbytes,
            "offset_bytes": self.engine.book.statistics.nbytes,
            "offset_pairs": len(self.engine.book.statistics.pairs),
            "warm_up": "learning runs the same shapes before anything is timed",
        }

    def _digests(self) -> tuple[str, str]:
        return self.engine.book.statistics.digest(), self.engine.pool.digest()
