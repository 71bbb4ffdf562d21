"""One trial: a workload is built, an engine learns from the fill cases, the others are measured, the pool frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress

from eval.measure import Row, fill, measure, own_engines, register
from eval.methods import Method
from eval.setting import Setting
from eval.tasks.base import Problem
from eval.topologies import TOPOLOGIES
from eval.workload import Workload, build
from kvcomm import Engine
from kvcomm.errors import InvalidInput, KVCommError


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

    Raises:
        InvalidInput: an unknown topology or fill_by, or no repeats.
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

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES or self.fill_by not in ("generate", "prefill") or self.repeats < 1:
            raise InvalidInput(
                f"topology {self.topology!r} must be one of {sorted(TOPOLOGIES)}, fill-by {self.fill_by!r} generate or "
                f"prefill, and repeats {self.repeats} at least 1"
            )

    def prepare(self, setting: Setting, problems: Sequence[Problem], methods: Mapping[str, Method]) -> Bench:
        """Cut the workload and make the engines; nothing is run yet."""
        workload = build(
            problems,
            TOPOLOGIES[self.topology],
            setting.tokenizer,
            agents=self.agents,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            measured=self.prompts,
            fill=self.fill_prompts,
            seed=self.seed,
        )
        engine, rounded = setting.engine(), setting.rounded()
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
    _frozen: tuple[str, str] = field(default=("", ""), init=False)

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
        self._frozen = self._digests()
        limit = len(self.workload.measured) if rounded_cases is None else rounded_cases
        for number, case in enumerate(self.workload.measured):
            rounded = self.rounded if number < limit else None
            yield from measure(
                self.engine, self.workload, case, self.methods, self.trial.repeats, rounded, self.engines
            )
        if self._digests() != self._frozen:
            raise KVCommError("the pool changed while it was measured; the figures are void")

    def run(self, progress: Progress, name: str) -> list[Row]:
        """Learn and measure under a progress bar."""
        nodes = len(self.workload.nodes)
        step = progress.add_task(f"{name}: learning", total=len(self.workload.fill) * nodes)
        for _ in self.learn():
            progress.advance(step)
        step = progress.add_task(
            f"{name}: measuring", total=len(self.workload.measured) * nodes * (len(self.methods) + 1)
        )
        rows = []
        for row in self.rows():
            rows.append(row)
            progress.advance(step)
        return rows

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
