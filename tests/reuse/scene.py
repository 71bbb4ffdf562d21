"""Prompts on tiny models for the splice's tests, and plain torch to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import Base
from kvcomm.anchors.statistics import Pair
from kvcomm.hf.backend import HFBackend
from kvcomm.keys import Recipe
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import PartPlan, Plan
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.run import prepare
from kvcomm.reuse.select import Scene, Selected
from kvcomm.reuse.splice import cut
from kvcomm.types import Segment, SegmentKV
from tests.tiny_models import FAMILIES, as_cached, as_held
from tests.tiny_tokenizer import tiny_tokenizer

State = list[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's rotated keys and values, [1, kv heads, T, head_dim]."""


@cache
def backend_of(family: str) -> HFBackend:
    """The family's tiny model behind HFBackend; one for all tests, none of which changes it."""
    return HFBackend(FAMILIES[family](), tiny_tokenizer())


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Random ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 128, (count,), generator=generator).tolist())


def dense(backend: HFBackend, ids: Sequence[int]) -> tuple[torch.Tensor, State]:
    """The model's own prefill with transformers' own cache: logits [T, vocabulary] and the KV it leaves."""
    cache = DynamicCache()
    with torch.inference_mode():
        logits = backend.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True).logits[0]
    return logits, [as_held(layer.keys, layer.values, backend.model) for layer in cache.layers]


def filled(backend: HFBackend, ids: Sequence[int], room: int = 0) -> KVBuffer:
    """A buffer with the ids' KV, computed by HFBackend in one forward."""
    buffer = KVBuffer(backend.spec, len(ids) + room)
    backend.forward(buffer, ids, range(len(ids)), logits=0)
    return buffer


def captured(backend: HFBackend, before: Sequence[int], segment: Sequence[int]) -> SegmentKV:
    """The segment's unrotated KV behind other tokens."""
    buffer = filled(backend, (*before, *segment))
    return cut(buffer, backend.spec, len(before), len(before) + len(segment))


def one_by_one(backend: HFBackend, ids: Sequence[int], state: State, positions: Sequence[int]) -> torch.Tensor:
    """Recompute positions in plain torch, one token at a time, each behind an ordinary cache of all that stands before
    it and with the model's own masks; ``state`` is changed in place. Returns the last one's logits [vocabulary].
    """
    logits = torch.empty(0)
    for p in positions:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(state):
            if p:
                cache.update(*as_cached(keys[:, :, :p].clone(), values[:, :, :p].clone(), backend.model), index)
        with torch.inference_mode():
            given = {"position_ids": torch.tensor([[p]]), "past_key_values": cache, "use_cache": True}
            logits = backend.model(torch.tensor([[ids[p]]]), **given).logits[0, -1]
        for (keys, values), layer in zip(state, cache.layers, strict=True):
            new = as_held(layer.keys[:, :, -1], layer.values[:, :, -1], backend.model)
            keys[:, :, p], values[:, :, p] = new
    return logits


def state_of(buffer: KVBuffer, length: int) -> State:
    """A copy of the buffer's first ``length`` tokens."""
    return [
        (k[None, :, :length].clone(), v[None, :, :length].clone())
        for k, v in zip(buffer.keys, buffer.values, strict=True)
    ]


@dataclass(frozen=True)
class Chosen:
    """A selection that is told what to choose."""

    positions: tuple[int, ...]

    def choose(self, scene: Scene) -> Selected:
        return Selected(self.positions)


class TrueOffsets(OffsetBook):
    """A book that knows: for each pair the offset it was given."""

    def __init__(self, backend: HFBackend, known: dict[Pair, SegmentKV]) -> None:
        super().__init__(backend.spec.fingerprint)
        self.known = known

    def estimate(self, pair: Pair, base: SegmentKV) -> SegmentKV | None:
        return self.known.get(pair)


@dataclass(frozen=True)
class Case:
    """A prompt head + segment + middle + segment + tail, its two segments held as captured behind other tokens.

    Attributes:
        true: each segment's unrotated KV in this prompt, as the model itself computes it.
    """

    backend: HFBackend
    plan: Plan
    true: tuple[SegmentKV, SegmentKV]
    logits: torch.Tensor
    state: State

    @property
    def ids(self) -> tuple[int, ...]:
        return self.plan.prompt.token_ids

    @property
    def reused(self) -> list[int]:
        """Positions of the two segments."""
        return [p for part in self.plan.parts if part.action == "approximate" for p in range(part.start, part.stop)]

    def offsets(self) -> TrueOffsets:
        """What this prompt's context truly adds to each base."""
        held = [part for part in self.plan.parts if part.base is not None]
        return TrueOffsets(
            self.backend,
            {
                part.pair: SegmentKV(true.keys - part.base.kv.keys, true.values - part.base.kv.values)
                for part, true in zip(held, self.true, strict=True)
                if part.pair is not None and part.base is not None
            },
        )

    def run(self, book: OffsetBook, recompute: Sequence[int]) -> tuple[KVBuffer, torch.Tensor, State]:
        """Carry the plan out; returns the buffer with the whole prompt, its last token's logits [vocabulary], and the
        state as it was spliced, before anything was computed.
        """
        policy = Reuse(select=Chosen(()), dense_above=1.0)
        _, spliced = prepare(self.backend, self.plan, policy, book, 0)
        before = state_of(spliced, len(self.ids))
        policy = Reuse(select=Chosen(tuple(recompute)), dense_above=1.0)
        _, buffer = prepare(self.backend, self.plan, policy, book, 0)
        start = buffer.length
        logits = self.backend.forward(buffer, self.ids[start:], range(start, len(self.ids)), logits=1)[-1]
        return buffer, logits, before


def make_case(
    backend: HFBackend, lengths: tuple[int, int, int, int, int], away: tuple[int, int], seed: int = 0
) -> Case:
    """A case with parts of the given lengths, its segments captured behind ``away`` other tokens."""
    pieces = [tokens(length, seed + n) for n, length in enumerate(lengths)]
    return case_of(backend, pieces, [tokens(count, seed + 50 + n) for n, count in enumerate(away)])


def case_of(backend: HFBackend, pieces: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Case:
    """A case of given token ids; ``before`` stood in front of the two segments when they were captured."""
    prompt = Prompt(tuple(Part(Segment(tuple(piece)), f"agent/{n}") for n, piece in enumerate(pieces)))
    ids = prompt.token_ids
    logits, state = dense(backend, ids)
    whole = filled(backend, ids)
    parts, true = [], []
    for index, (part, start) in enumerate(zip(prompt.parts, prompt.starts, strict=True)):
        if index in (1, 3):
            other = before[index // 2]
            base = Base(
                part.segment,
                Recipe("prompt", f"other/{index}", "", True),
                captured(backend, other, part.segment.token_ids),
            )
            pair = Pair("prompt", f"other/{index}", part.label)
            parts.append(PartPlan(part, start, "approximate", "held", base, pair))
            true.append(cut(whole, backend.spec, start, start + len(part.segment)))
        else:
            parts.append(PartPlan(part, start, "new", "new"))
    return Case(backend, Plan(prompt, tuple(parts), "test"), (true[0], true[1]), logits, state)


def error(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what was expected."""
    difference: torch.Tensor = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def state_error(found: State, expected: State) -> float:
    """The largest error of any layer's keys or values."""
    return max(error(f, e) for one, other in zip(found, expected, strict=True) for f, e in zip(one, other, strict=True))
