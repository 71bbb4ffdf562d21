"""Dense against reused on the same prompts: two agents, the second of which gets what the first has read and said."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from kvcomm import Dense, Engine, Segment, Slot, System
from kvcomm.check.prompts import Example
from kvcomm.closeness import kl_divergence, top1_agreement
from kvcomm.hf.agent import Agent
from kvcomm.hf.reply import Reply
from kvcomm.reuse.judgement import Judgement
from kvcomm.reuse.policy import Policy

GREEDY: Mapping[str, Any] = {"do_sample": False}
_DENSE: Mapping[str, Any] = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
READER = "You read what you are given and note what matters. Be brief.\n\n"
WRITER = "You answer questions about the notes of a colleague. Rely on them alone.\n\n"


@dataclass(frozen=True)
class Row:
    """One prompt under one method.

    Attributes:
        kl: mean KL in nats over the dense run's answer; ``top1`` the share of its tokens ranked first.
        reuse: share of the tokens that were reused.
        judgement: what was predicted, where the policy bounds closeness.
        dense_s, ttft_s: seconds to the first token, dense and so; 0 where it was not taken.
    """

    kind: str
    method: str
    kl: float
    top1: float
    reuse: float
    judgement: Judgement | None
    dense_s: float = 0.0
    ttft_s: float = 0.0


def pair_of(engine: Engine, texts: int) -> tuple[Agent, Agent]:
    """The reader and the writer for so many texts."""
    slots: list[str | Slot] = []
    for n in range(texts):
        slots += [f"\n\nText {n + 1}:\n", Slot(f"text_{n + 1}")]
    reader = engine.agent(f"reader-{texts}", [System(READER), *slots, "\n\nIn two sentences:\n"])
    writer = engine.agent(
        f"writer-{texts}",
        [System(WRITER), "He said:\n", Slot("message"), "\n\nHe had read:", *slots, "\n\nQuestion: ", Slot("question"),
         "\nAnswer:"],
    )  # fmt: skip
    return reader, writer


def study(
    engine: Engine,
    fill: Sequence[Example],
    measured: Sequence[Example],
    methods: Mapping[str, Policy],
    answer_tokens: int = 24,
    timed: Sequence[str] = (),
    rounded: bool = False,
) -> Iterator[Row]:
    """Learn offsets from the prompts of ``fill``, then a row for each method on each of ``measured``.

    Args:
        methods: policies by name.
        timed: names of those whose TTFT is taken, twice, beside the dense run's.
        rounded: whether the dense run of a bfloat16 copy of the model is compared too, as method ``yardstick``.
    """
    yardstick = _rounded(engine) if rounded else None
    for example in fill:
        reader, writer = pair_of(engine, len(example.texts))
        said = reader.generate(max_new_tokens=answer_tokens, policy=Dense(), options=GREEDY, **_texts(example.first))
        writer.study(**_slots(example, said.segment))
    for example in measured:
        pair_of(engine, len(example.texts))
        own = engine.fork()  # the texts of one prompt shall not serve the next
        reader, writer = pair_of(own, len(example.texts))
        said = reader.generate(max_new_tokens=answer_tokens, policy=Dense(), options=GREEDY, **_texts(example.first))
        slots = _slots(example, said.segment)
        frozen = own.fork(policy=Dense(), learn=False)
        dense = frozen.agents[writer.name].generate(max_new_tokens=answer_tokens, options=_DENSE, **slots)
        logits = torch.cat(list(dense.output.logits)).float()
        for name, policy in methods.items():
            row = _compare(example.kind, name, own.fork(policy=policy, learn=False), writer.name, slots, dense, logits)
            yield _timed(row, own, policy, writer.name, slots) if name in timed else row
        if yardstick is not None:
            pair_of(yardstick, len(example.texts))
            yield _compare(example.kind, "yardstick", yardstick, writer.name, slots, dense, logits)


def _compare(
    kind: str, name: str, engine: Engine, agent: str, slots: Mapping[str, Any], dense: Reply, logits: torch.Tensor
) -> Row:
    other, plan = engine.agents[agent].force(Segment(dense.token_ids), **slots)
    kl = float(kl_divergence(logits, other.to(logits.device)).mean().clamp_min(0))
    return Row(kind, name, kl, top1_agreement(logits, other.to(logits.device)), plan.reuse_rate, plan.judgement)


def _timed(row: Row, engine: Engine, policy: Policy, agent: str, slots: Mapping[str, Any]) -> Row:
    """With TTFT, the better of two, dense and reused in turn; nothing is kept."""
    found: dict[str, list[float]] = {"dense": [], "reused": []}
    agents = {
        "dense": engine.fork(policy=Dense(), learn=False).agents[agent],
        "reused": engine.fork(policy=policy, learn=False).agents[agent],
    }
    for _ in range(2):
        for name, asked in agents.items():
            found[name].append(asked.generate(max_new_tokens=1, options=GREEDY, **slots).ttft_s)
    return Row(
        row.kind, row.method, row.kl, row.top1, row.reuse, row.judgement, min(found["dense"]), min(found["reused"])
    )


def _texts(texts: Sequence[str]) -> dict[str, Any]:
    return {f"text_{n + 1}": text for n, text in enumerate(texts)}


def _slots(example: Example, message: Segment) -> dict[str, Any]:
    return {**_texts(example.texts), "message": message, "question": example.question}


def _rounded(engine: Engine) -> Engine | None:
    """An engine on a bfloat16 copy of the model, or None where the model has no more digits than that."""
    if engine.pool.fingerprint.torch_dtype != torch.float32:
        return None
    model = copy.deepcopy(engine.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return Engine(model, engine.tokenizer, policy=Dense(), weights="in bfloat16", learn=False)


def summary(rows: Sequence[Row], method: str, max_kl: float) -> dict[str, float]:
    """Means of a method over its prompts, and the share of these above ``max_kl``."""
    mine = [row for row in rows if row.method == method]
    timed = [row.dense_s / row.ttft_s for row in mine if row.ttft_s > 0]
    return {
        "mean_kl": fmean(row.kl for row in mine),
        "largest_kl": max(row.kl for row in mine),
        "above": fmean(row.kl > max_kl for row in mine),
        "top1": fmean(row.top1 for row in mine),
        "reuse": fmean(row.reuse for row in mine),
        **({"ttft_gain": median(timed)} if timed else {}),
    }


def progressing(rows: Iterator[Row], say: Callable[[str], None]) -> list[Row]:
    """All rows, a line said for each as it comes."""
    began, found = time.perf_counter(), []
    for row in rows:
        found.append(row)
        say(f"{time.perf_counter() - began:6.1f} s  {row.kind:<12} {row.method:<16} KL {row.kl:.5f}")
    return found
