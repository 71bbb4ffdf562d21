"""Learned sums of made-up calls, in small whole numbers, so that every sum is exact in whatever order it is taken."""

import torch

from kvcomm.anchors.book import Observation
from kvcomm.anchors.gain import Gain
from kvcomm.anchors.saved import Learned
from kvcomm.anchors.statistics import Pair
from kvcomm.types import ModelFingerprint, SegmentKV

MODEL = ModelFingerprint("tiny", "w", "r", "float32", "", "t", 3, 2, 2)


def observation(number: int, tokens: int = 3) -> Observation:
    """One call, at a place that no other call has."""
    generator = torch.Generator().manual_seed(number)
    shape = (MODEL.n_layers, MODEL.n_kv_heads, tokens, MODEL.head_dim)
    parts = [torch.randint(-4, 5, shape, generator=generator).float() for _ in range(4)]
    return Observation(pair(number), SegmentKV(*parts[:2]), SegmentKV(*parts[2:]))


def pair(number: int) -> Pair:
    return Pair("prompt", "a/x", f"b{number}/y")


def learned(*numbers: int) -> Learned:
    """What a book would hold that saw just these calls."""
    total = Learned.empty(MODEL)
    for number in numbers:
        seen = observation(number)
        total.statistics.observe(seen.pair, seen.base, seen.true)
        gain = Gain(total.statistics.layers)
        gain.calls, gain.predicted, gain.observed = 1, gain.predicted + number, gain.observed + 1
        total.gains.setdefault(seen.pair, Gain(total.statistics.layers)).add(gain)
    return total
