"""Measuring one case: dense, exact and reused alternate in one process, every method on the dense run's own texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eval.methods import Method
from eval.topologies import Node
from eval.workload import Case, Workload
from kvcomm import Dense, Engine, Segment
from kvcomm.closeness import is_tie, kl_divergence
from kvcomm.hf.reply import Reply

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
        return {**documents, "task": self.case.slots["task"], **{name: self.messages[name] for name in node.hears}}


def register(engine: Engine, workload: Workload) -> None:
    """Give the engine the workload's agents."""
    for node in workload.nodes:
        engine.agent(node.name, node.template())


def own_engines(engine: Engine, methods: Mapping[str, Method]) -> dict[str, Engine]:
    """An engine for each method that needs one of its own; make them once the agents are registered."""
    return {name: method.engine(engine) for name, method in methods.items() if method.engine is not None}


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
                reply = (
                    engine.fork(learn=False)
                    .agents[node.name]
                    .generate(max_new_tokens=workload.answer_tokens, policy=Dense(), options=GREEDY, **slots)
                )
                talk.messages[node.name] = reply.segment
            else:
                talk.messages[node.name] = case.references[node.name]
            for learner in (engine, *others):
                learner.agents[node.name].study(answer=talk.messages[node.name], **slots)
            yield


def measure(
    engine: Engine,
    workload: Workload,
    case: Case,
    methods: Mapping[str, Method],
    repeats: int,
    rounded: Engine | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> Iterator[Row]:
    """Rows of one case: for each agent one a method, in the order of the agents.

    Args:
        repeats: how often each TTFT is taken.
        rounded: an engine on the same model in bfloat16; its dense run makes rows of method ``yardstick``.

        engines: those of ``own_engines``.

    The pool and the offsets of ``engine`` stay as they are. Each method has a scratch pool for the case, in which the
    case's texts are kept when they first occur, as in use.
    """
    talk = Conversation(case, {})
    owned = engines or {}
    sessions = {name: owned.get(name, engine).fork(policy=method.policy) for name, method in methods.items()}
    for node in workload.nodes:
        slots = talk.slots(node)
        dense = _dense(engine, node, slots, workload.answer_tokens)
        answer = Segment(dense.token_ids)
        isolation = {name: _isolate(sessions[name], node, slots) for name, m in methods.items() if m.isolates}
        ttft = _first_tokens(sessions, node, slots, repeats)
        reference = torch.cat(dense.output.logits).float()
        for name, session in sessions.items():
            logits, plan = session.agents[node.name].force(answer, **slots)
            row = _closeness(reference, logits)
            row |= {
                "case": case.problem.id,
                "agent": node.name,
                "method": name,
                "answer": dense.text,
                "prompt_tokens": len(plan.prompt),
                "tokens": asdict(plan.counts),
                "reuse": plan.reuse_rate,
                "ttft_s": ttft[name],
                "isolate_s": isolation.get(name, 0.0),
                "why": plan.why,
            }
            yield row
        if rounded is not None:
            logits, _ = rounded.agents[node.name].force(answer, policy=Dense(), **slots)
            yield _closeness(reference, logits) | {"case": case.problem.id, "agent": node.name, "method": "yardstick"}
        talk.messages[node.name] = dense.segment


def _dense(engine: Engine, node: Node, slots: Mapping[str, Segment], tokens: int) -> Reply:
    agent = engine.fork(policy=Dense(), learn=False).agents[node.name]
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    return agent.generate(max_new_tokens=tokens, options=options, **slots)


def _isolate(session: Engine, node: Node, slots: Mapping[str, Segment]) -> float:
    started = time.perf_counter()
    prompt = session.agents[node.name].prompt(**slots)
    session.isolate([part.segment for part in prompt.parts[1:]])
    return time.perf_counter() - started


def _first_tokens(
    sessions: Mapping[str, Engine], node: Node, slots: Mapping[str, Segment], repeats: int
) -> dict[str, list[float]]:
    """TTFT in seconds of each method, ``repeats`` times, the methods taking turns; nothing is kept or learned."""
    timers: dict[str, Callable[[], Reply]] = {}
    for name, session in sessions.items():
        agent = session.fork(policy=session.policy, learn=False).agents[node.name]
        timers[name] = lambda agent=agent: agent.generate(max_new_tokens=1, options=GREEDY, **slots)  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(repeats):
        for name, call in timers.items():
            found[name].append(call().ttft_s)
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
