"""Measuring one case: dense, exact and reused alternate in one process, every method on the dense run's own texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eval.cases.workload import Case, Workload
from eval.figures.estimate import expected_error
from eval.figures.flops import prefill_flops
from eval.figures.judge import chosen
from eval.methods.followers import Followers
from eval.methods.registry import Method
from eval.topologies import Node
from kvcomm import Dense, Engine, Segment
from kvcomm.anchors.pool import BasePool
from kvcomm.closeness import is_tie, kl_divergence
from kvcomm.errors import KVCommError
from kvcomm.hf.reply import Reply
from kvcomm.reuse.policy import Policy

Row = dict[str, Any]
GREEDY: Mapping[str, Any] = {"do_sample": False}


@dataclass
class Conversation:
    """What the agents of one case have said so far, by agent name."""

    case: Case
    messages: dict[str, Segment]

    def slots(self, node: Node) -> dict[str, Segment]:
        """Values for the slots of ``node``'s template."""
        documents = {f"document_{n + 1}": self.case.slots[f"document_{n + 1}"] for n in range(node.documents)}
        heard = {slot: self.messages[name] for slot, name in node.slots.items()}
        return {**documents, "task": self.case.slots["task"], **heard}


def register(engine: Engine, workload: Workload) -> None:
    """Give the engine the workload's agents."""
    for node in workload.nodes:
        engine.agent(node.agent, node.template())


def own_engines(engine: Engine, methods: Mapping[str, Method]) -> dict[str, Engine]:
    """An engine for each method that needs one of its own; make them once the agents are registered."""
    return {name: method.engine(engine) for name, method in methods.items() if method.engine is not None}


@dataclass(frozen=True)
class Session:
    """A method and an engine that follows it, with a scratch pool for one case."""

    method: Method
    engine: Engine


def sessions_of(engine: Engine, methods: Mapping[str, Method], owned: Mapping[str, Engine]) -> dict[str, Session]:
    """A session for each method, on ``engine`` unless it owns one, with its own offsets if it estimates its own."""
    followers = engine.book.books if isinstance(engine.book, Followers) else {}
    sessions = {}
    for name, method in methods.items():
        own = owned.get(name, engine).fork(policy=method.policy)
        own.book = followers.get(name, own.book)
        sessions[name] = Session(method, own)
    return sessions


def fill(engine: Engine, workload: Workload, generate: bool, others: Sequence[Engine] = ()) -> Iterator[None]:
    """Let the engine learn from the fill cases, one step an agent.

    Args:
        generate: whether agents really write their messages (densely); otherwise each case's reference texts stand
            for them and nothing but prefills is run.
        others: engines of methods that learn in their own way, from the same calls.
    """
    for case in workload.fill:
        talk = Conversation(case, {})
        for node in workload.nodes:
            slots = talk.slots(node)
            if generate:
                agent = engine.agents[node.agent]
                reply = agent.generate(
                    max_new_tokens=workload.answer_tokens, policy=Dense(), options=GREEDY, **slots
                )  # a dense call teaches what a study would
                talk.messages[node.name] = reply.segment
            else:
                talk.messages[node.name] = case.references[node.name]
                engine.agents[node.agent].study(answer=talk.messages[node.name], **slots)
            for learner in others:
                learner.agents[node.agent].study(answer=talk.messages[node.name], **slots)
            yield


def measure(
    engine: Engine,
    nodes: Sequence[Node],
    talk: Conversation,
    sessions: Mapping[str, Session],
    answer_tokens: int,
    repeats: int,
    rounded: Engine | None = None,
    writes: str = "",
) -> Iterator[Row]:
    """Rows of one case: for each call of ``nodes`` one a method, in the order of the calls.

    Args:
        talk: what was said before; the agents' dense answers are added to it.
        sessions: of ``sessions_of``, one a method.
        answer_tokens: tokens of an answer at most.
        repeats: how often each TTFT is taken; with 0 it is not.
        rounded: an engine on the same model in bfloat16; its dense run makes rows of method ``yardstick``.
        writes: name of the call whose answer each method really writes too, having heard what the dense run said.

    The pool and the offsets of ``engine`` stay as they are. Each session keeps the case's texts when they first occur,
    as in use.
    """
    for node in nodes:
        slots = talk.slots(node)
        dense = dense_answer(engine, node, slots, answer_tokens)
        isolation = {name: _isolate(s, node, slots) for name, s in sessions.items() if s.method.isolates}
        ttft = _first_tokens({name: s.engine for name, s in sessions.items()}, node, slots, repeats)
        case = {"case": talk.case.problem.id}
        wrote = own_answers(sessions, node, slots, answer_tokens) if node.name == writes else {}
        for name, session in sessions.items():
            times = {"ttft_s": ttft[name].seconds, "isolate_s": isolation.get(name, 0.0)}
            row = compare(dense, session.engine, node, slots) | case | times | wrote.get(name, {}) | {"method": name}
            ttft[name].check(row)
            yield row
        if rounded is not None:
            yield compare(dense, rounded, node, slots, Dense()) | case | {"method": "yardstick"}
        talk.messages[node.name] = dense.segment


def own_answers(
    sessions: Mapping[str, Session], node: Node, slots: Mapping[str, Segment], tokens: int
) -> dict[str, Row]:
    """What each method answers by itself, ``own_answer``; nothing is kept or learned."""
    found = {}
    for name, session in sessions.items():
        agent = session.engine.fork(policy=session.engine.policy, learn=False).agents[node.agent]
        found[name] = {"own_answer": agent.generate(max_new_tokens=tokens, options=GREEDY, **slots).text}
    return found


def open_case(engine: Engine, workload: Workload, talk: Conversation) -> Engine:
    """Let the agent that hears nobody speak densely once; the engine returned holds the KV of what then first occurred.

    Every method would begin with this same prefill: done once, it need not be repeated for each.
    """
    node = workload.nodes[0]
    slots = talk.slots(node)
    talk.messages[node.name] = dense_answer(engine, node, slots, workload.answer_tokens).segment
    opened = engine.fork(policy=Dense())
    opened.agents[node.agent].force(talk.messages[node.name], **slots)
    return opened


def dense_answer(engine: Engine, node: Node, slots: Mapping[str, Segment], tokens: int) -> Reply:
    """The agent's dense greedy answer with its logits; nothing is kept or learned."""
    agent = engine.fork(policy=Dense(), learn=False).agents[node.agent]
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    return agent.generate(max_new_tokens=tokens, options=options, **slots)


def compare(
    dense: Reply, engine: Engine, node: Node, slots: Mapping[str, Segment], policy: Policy | None = None
) -> Row:
    """Closeness of ``engine`` to a dense answer, teacher-forced on its tokens, and what was reused for it."""
    logits, plan = engine.agents[node.agent].force(Segment(dense.token_ids), policy=policy, **slots)
    true = torch.cat(dense.output.logits).float()
    return (
        _closeness(true, logits)
        | chosen(engine.tokenizer, node.choices, true[0], logits[0])
        | {
            "agent": node.name,
            "flops": prefill_flops(engine.model, plan),
            "expected_error": expected_error(engine.book, plan),
            "held_bytes": held_bytes(engine.pool),
            "answer": dense.text,
            "prompt_tokens": len(plan.prompt),
            "tokens": asdict(plan.counts),
            "reuse": plan.reuse_rate,
            "why": plan.why,
        }
    )


def held_bytes(pool: BasePool) -> int:
    """KV held since what was learned: of this pool and those that it reads through to, but the last of them."""
    return 0 if pool.parent is None else pool.nbytes + held_bytes(pool.parent)


def _isolate(session: Session, node: Node, slots: Mapping[str, Segment]) -> float:
    started = time.perf_counter()
    engine, behind = session.engine, None
    if session.method.behind is not None:
        ids = engine.tokenizer(session.method.behind, add_special_tokens=False)["input_ids"]
        behind = Segment(tuple(ids))
    prompt = engine.agents[node.agent].prompt(**slots)
    engine.isolate([part.segment for part in prompt.parts[1:]], behind)
    return time.perf_counter() - started


@dataclass
class Timed:
    """TTFT in seconds of each call of a method, and the tokens of each kind in it."""

    seconds: list[float]
    tokens: list[dict[str, int]]

    def check(self, row: Row) -> None:
        """Raise where the call that was compared did not reuse what those that were timed did."""
        for tokens in self.tokens:
            if tokens != row["tokens"]:
                raise KVCommError(
                    f"{row['method']}, {row['agent']}, {row['case']}: timed with {tokens} tokens, compared with "
                    f"{row['tokens']}; the figures are void"
                )


def _first_tokens(
    sessions: Mapping[str, Engine], node: Node, slots: Mapping[str, Segment], repeats: int
) -> dict[str, Timed]:
    """TTFT of each method, ``repeats`` times, the methods taking turns; nothing is kept or learned."""
    timers: dict[str, Callable[[], Reply]] = {}
    for name, session in sessions.items():
        agent = session.fork(policy=session.policy, learn=False).agents[node.agent]
        timers[name] = lambda agent=agent: agent.generate(max_new_tokens=1, options=GREEDY, **slots)  # type: ignore[misc]
    found = {name: Timed([], []) for name in sessions}
    for _ in range(repeats):
        for name, call in timers.items():
            reply = call()
            found[name].seconds.append(reply.ttft_s)
            found[name].tokens.append(asdict(reply.plan.counts))
    return found


def _closeness(dense: torch.Tensor, other: torch.Tensor) -> Row:
    """Closeness of one answer, teacher-forced on the dense run's greedy tokens; logits are [tokens, vocabulary]."""
    kl = kl_divergence(dense, other)
    same = dense.argmax(-1) == other.argmax(-1)
    differing = (~same).nonzero()
    run = int(differing[0]) if len(differing) else len(same)
    return {
        "answer_tokens": len(same),
        "mean_kl": float(kl.mean().clamp_min(0)),
        "first_kl": float(kl[0].clamp_min(0)),
        "top1": float(same.double().mean()),
        "first_token": float(same[0]),
        "greedy_run": run,
        "greedy_run_share": run / len(same),
        "tie": bool(run < len(same) and is_tie(dense[run])),
    }
