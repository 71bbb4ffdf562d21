"""What the passes of one call show of its errors: expected by the table, observed at probes, weighted by attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm.anchors.book import OffsetBook
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.judgement import Features
from kvcomm.reuse.plan import PartPlan, Plan

RANDOM_PROBES = 2
_TOKENS_A_PROBE = 8  # shorter segments get fewer probes
_UNKNOWN_ERROR = 0.3  # of tokens at a place of which nothing was observed: about what re-rotation alone leaves
_PRIOR_PROBES = (
    4.0  # weight, in tokens, of the call's ratio against a segment's own probes, and of 1 against the call's
)


@dataclass(frozen=True)
class Evidence:
    """One reused segment.

    Attributes:
        index: of its part in the plan.
        positions: of its tokens that hold spliced KV, int64 [n].
        expected: their expected squared errors, float64 [n].
        observed: where they were computed again, the squared distance of fresh from spliced KV, elsewhere NaN; [n].
        attended: attention they receive from the closing request, a probability a token, [n].
        first: the same from the prompt's last token, [n].
    """

    index: int
    positions: torch.Tensor
    expected: torch.Tensor
    observed: torch.Tensor
    attended: torch.Tensor
    first: torch.Tensor

    def left(self, plan: Plan) -> torch.Tensor:
        """Which tokens ``plan`` leaves as they were spliced, bool [n]."""
        computed = {*plan.computed}
        return torch.tensor([p not in computed for p in self.positions.tolist()], dtype=torch.bool)


def gather(plan: Plan, book: OffsetBook) -> list[Evidence]:
    """What is known before any pass: expected errors, and attention alike over the prompt."""
    table = book.errors()
    found = []
    for index, part in enumerate(plan.parts):
        if not part.selectable or part.base is None:
            continue
        if table is None:
            expected = torch.full((part.stop - part.start,), _UNKNOWN_ERROR, dtype=torch.float64)
        else:
            expected = table.expect(part.pair, part.stop - part.start).double()
        held = torch.tensor(sorted({*range(part.start, part.stop)} - {*part.absent}), dtype=torch.int64)
        if not len(held):
            continue
        even = torch.full((len(held),), 1.0 / len(plan.prompt), dtype=torch.float64)
        unseen = torch.full_like(even, torch.nan)
        found.append(Evidence(index, held, expected[held - part.start], unseen, even, even))
    return found


def random_probes(part: PartPlan) -> set[int]:
    """A few positions inside a segment beyond those that a selection takes; the same for the same text and place."""
    taken = {*part.computed}
    left = [p for p in range(part.start, part.stop) if p not in taken]
    count = min(RANDOM_PROBES, len(left) // _TOKENS_A_PROBE)
    return set(random.Random(f"{part.part.segment.digest} {part.part.label}").sample(left, count))


class Spliced:
    """A copy of the KV that was spliced at some positions, taken before a pass writes over it."""

    def __init__(self, buffer: KVBuffer, positions: Sequence[int]) -> None:
        self._at = torch.tensor(positions, dtype=torch.int64, device=buffer.keys.device)
        self.positions = list(positions)
        self._kv = [part[1:].index_select(2, self._at) for part in (buffer.keys, buffer.values)]

    def errors(self, buffer: KVBuffer) -> torch.Tensor:
        """Squared distance of what ``buffer`` holds now, relative to its mean square in the layer; float64 [n]."""
        total = torch.zeros(len(self.positions), dtype=torch.float64)
        if not len(self._at) or not len(self._kv[0]):
            return total
        for part, spliced in zip((buffer.keys, buffer.values), self._kv, strict=True):
            fresh = part[1:].index_select(2, self._at).float()
            off = (fresh - spliced.float()).square().sum((1, 3))  # [layers - 1, n]
            unit = fresh.square().sum((1, 3)).mean(1, keepdim=True).clamp_min(1e-30)
            total += (off / unit).mean(0).double().cpu()
        return total / 2


def ratios(evidence: Sequence[Evidence]) -> list[float]:
    """For each segment the observed over the expected error at its probes, shrunk to the call's, and that to 1."""
    seen = [_sums(e) for e in evidence]
    mean = sum(s[2] for s in seen) / max(sum(s[3] for s in seen), 1)
    prior = _PRIOR_PROBES * max(mean, 1e-12)
    call = (sum(s[0] for s in seen) + prior) / (sum(s[1] for s in seen) + prior)
    found = []
    for observed, expected, total, count in seen:
        weight = _PRIOR_PROBES * max(total / max(count, 1), 1e-12)
        found.append((observed + weight * call) / (expected + weight))
    return found


def _sums(e: Evidence) -> tuple[float, float, float, int]:
    probed = ~e.observed.isnan()
    return float(e.observed[probed].sum()), float(e.expected[probed].sum()), float(e.expected.sum()), len(e.positions)


def features(e: Evidence, ratio: float, tokens: int, left: torch.Tensor) -> Features:
    """Of a segment alone, with ``left`` (bool [n]) of its tokens as spliced, in a prompt of so many tokens.

    What is not finite (spliced KV so far off that its square, or the attention it receives, is none) stays so: no bound
    holds for it.
    """
    off = (e.expected * ratio)[left]
    return Features(
        float((off * e.attended[left]).sum()), float(off.sum()) / tokens, float((off * e.first[left]).sum())
    )
