"""Methods to compare, by name. A method is a policy and where its bases come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval.methods.kvcomm_paper import PaperEngine
from eval.methods.oracle import TrueDeviation
from kvcomm import Engine
from kvcomm.anchors.book import OffsetBook
from kvcomm.errors import InvalidInput
from kvcomm.keys import Origin
from kvcomm.reuse.policy import Balanced, Dense, Exact, Fast, Policy, Reuse
from kvcomm.reuse.select import Attended, Deviation, Leading, PredictedError, Product, SegmentError
from kvcomm.types import ModelFingerprint


@dataclass(frozen=True)
class Method:
    """A way to prefill.

    Attributes:
        policy: what is reused and recomputed.
        isolates: whether every text is prefilled alone before it is needed; that time is outside TTFT and reported.
        about: one line for people.
        engine: for a method that is more than a policy, makes an engine of its own over the one that is measured; it
            learns from the same fill cases.
        book: for a method that estimates offsets in another way, makes its book, which learns the same observations.
        behind: text that isolated bases are computed behind; the engine's neutral prefix unless given.
    """

    policy: Policy
    about: str
    isolates: bool = False
    engine: Callable[[Engine], Engine] | None = None
    book: Callable[[ModelFingerprint], OffsetBook] | None = None
    behind: str | None = None


ISOLATED: tuple[tuple[Origin, ...], ...] = (("isolated",),)
EXPECTED = (PredictedError(), SegmentError())
"""The error that a token is expected to have, times that of its segment."""
METHODS: dict[str, Method] = {
    "dense": Method(Dense(), "full prefill"),
    "exact": Method(Exact(), "prefix reuse: the same tokens from position 0"),
    "rerotate": Method(
        Reuse(origins=ISOLATED, offsets=False, select=Leading(0)),
        "isolated bases moved by re-rotation alone (llama.cpp --cache-reuse)",
        isolates=True,
    ),
    "leading": Method(
        Reuse(origins=ISOLATED, offsets=False, select=Leading(16)),
        "isolated bases, the first 16 tokens of each segment recomputed (EPIC, arXiv 2410.15332)",
        isolates=True,
    ),
    "deviation": Method(
        Reuse(origins=ISOLATED, offsets=False, select=Deviation(0.15)),
        "isolated bases, the 15 % that deviate most at the second layer recomputed (CacheBlend, arXiv 2405.16444)",
        isolates=True,
    ),
    "attended": Method(
        Reuse(origins=ISOLATED, offsets=False, select=Attended(0.20)),
        "isolated bases, the 20 % that the closing request attends to most recomputed (after ProphetKV, ICML 2026)",
        isolates=True,
    ),
    "leading-captured": Method(Reuse(offsets=False, select=Leading(16)), "leading, on captured bases"),
    "deviation-captured": Method(Reuse(offsets=False, select=Deviation(0.15)), "deviation, on captured bases"),
    "attended-captured": Method(Reuse(offsets=False, select=Attended(0.20)), "attended, on captured bases"),
    "kvcomm-paper": Method(
        Dense(), "KVCOMM as published (arXiv 2510.12872): entropy test, anchors' offsets", True, PaperEngine.over
    ),
    "kvcomm": Method(
        Balanced(gate=False),
        "captured bases, learned offsets, 8 tokens a segment of largest predicted error recomputed",
    ),
    "kvcomm-bounded": Method(
        Balanced(gate=False, max_kl=0.05),
        "kvcomm, and more recomputed where KL 0.05 would not be kept: Balanced(max_kl=0.05)",
    ),
    "kvcomm-fast": Method(Fast(), "captured bases and learned offsets, nothing recomputed: Fast()"),
    "kvcomm-predicted": Method(
        Reuse(select=Product(0.15, EXPECTED)), "captured bases, offsets, the 15 % of largest predicted error recomputed"
    ),
    "kvcomm-attended": Method(
        Reuse(select=Attended(0.20)), "captured bases, offsets, the 20 % that the closing request attends to most"
    ),
    "kvcomm-product": Method(
        Reuse(select=Product(0.15, (*EXPECTED, Attended()))),
        "captured bases, offsets, the 15 % of largest predicted error times attention recomputed",
    ),
    "oracle": Method(
        Reuse(select=TrueDeviation(0.15)), "captured bases, offsets, the 15 % truly furthest off recomputed; no TTFT"
    ),
}


def methods(names: list[str]) -> dict[str, Method]:
    """The named methods, in the order given.

    Raises:
        InvalidInput: a name is unknown.
    """
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise InvalidInput(f"unknown methods {unknown}; choose from {', '.join(METHODS)}")
    return {name: METHODS[name] for name in names}
