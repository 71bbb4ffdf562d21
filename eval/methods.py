"""Methods to compare, by name. A method is a policy and where its bases come from."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import InvalidInput
from kvcomm.reuse.policy import Balanced, Dense, Exact, Fast, Policy, Reuse
from kvcomm.reuse.select import Leading


@dataclass(frozen=True)
class Method:
    """A way to prefill.

    Attributes:
        policy: what is reused and recomputed.
        isolates: whether every text is prefilled alone before it is needed; that time is outside TTFT and reported.
        about: one line for people.
    """

    policy: Policy
    about: str
    isolates: bool = False


_ISOLATED = (("isolated",),)
METHODS: dict[str, Method] = {
    "dense": Method(Dense(), "full prefill"),
    "exact": Method(Exact(), "prefix reuse: the same tokens from position 0"),
    "rerotate": Method(
        Reuse(origins=_ISOLATED, offsets=False, select=Leading(0)),
        "isolated bases moved by re-rotation alone (llama.cpp --cache-reuse)",
        isolates=True,
    ),
    "leading": Method(
        Reuse(origins=_ISOLATED, offsets=False, select=Leading(16)),
        "isolated bases, the first 16 tokens of each segment recomputed (EPIC, arXiv 2410.15332)",
        isolates=True,
    ),
    "kvcomm": Method(Balanced(), "captured bases, learned offsets, leading tokens recomputed: Balanced()"),
    "kvcomm-fast": Method(Fast(), "captured bases and learned offsets, nothing recomputed: Fast()"),
    "ablation-captured": Method(
        Reuse(offsets=False, select=Leading(16)), "captured bases, the first 16 tokens recomputed, no offsets"
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
