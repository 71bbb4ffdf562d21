"""What a store offers where several nodes meet in it: news of its entries, merged sums, claims, nearly equal texts.

A store that has a ``coordinator`` is one that others change meanwhile; an engine then follows it instead of listing it,
and its learned offsets go through ``sums`` instead of a blob. A store without one is as private as its folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcomm.errors import InvalidInput
from kvcomm.keys import CacheKey
from kvcomm.store.base import Listing
from kvcomm.store.sums import SumsService
from kvcomm.types import ModelFingerprint, Namespace, Segment


@dataclass(frozen=True)
class Terms:
    """How long an engine waits for others while a call of its own runs.

    Attributes:
        silence_s: seconds without a byte after which the service counts as silent. A whole call waits no longer than
            that, and the next calls not at all until the service is heard of again.
        fetch_s: most seconds that fetching one base may take although bytes come.
        claim_tokens: texts of at least so many tokens are computed by one node at a time; shorter ones are cheaper to
            compute twice than to ask about.
        claim_s: how long one node's claim holds, and so how long another waits for it at most.

    Raises:
        InvalidInput: a number is not positive and finite.
    """

    silence_s: float = 1.0
    fetch_s: float = 10.0
    claim_tokens: int = 512
    claim_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("silence_s", "fetch_s", "claim_tokens", "claim_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} {value} is not a positive finite number; pass one")


DEFAULT_TERMS = Terms()


@dataclass(frozen=True)
class Nearby:
    """A held text, the cosine of its sketch with the one asked for, and the keys of its bases."""

    segment: Segment
    cosine: float
    keys: tuple[CacheKey, ...]


class Follower(Protocol):
    """Is told what others change, in order, by one thread. None of these may block for long."""

    def listed(self, listings: list[Listing]) -> None:
        """All that is held now; what is not among it is gone. Said first, and again after news were missed."""
        ...

    def added(self, key: CacheKey, group: str) -> None:
        """An entry was put."""
        ...

    def removed(self, key: CacheKey) -> None:
        """An entry was deleted. Evicted ones are not told of: getting them is a miss."""
        ...

    def dropped(self, group: str) -> None:
        """A group was dropped; the empty one stands for everything."""
        ...

    def alive(self) -> None:
        """The service was heard of."""
        ...


class Coordinator(Protocol):
    """Where nodes meet. All calls raise StoreError and end at their deadline."""

    terms: Terms
    node: str

    def sums(self, namespace: Namespace, fingerprint: ModelFingerprint) -> SumsService:
        """Where learned sums are merged."""
        ...

    def forget_sums(self, namespace: Namespace, fingerprint: ModelFingerprint, agent: str) -> None:
        """Drop what all nodes learned at an agent's labels."""
        ...

    def follow(self, namespace: Namespace, fingerprint: ModelFingerprint, follower: Follower) -> Callable[[], None]:
        """Tell ``follower`` until what is returned is called; bears that the service is away. Returns at once."""
        ...

    def claim(self, key: CacheKey, wait_s: float) -> tuple[bool, str]:
        """(held, claim): the entry is there; or the claim is the caller's; or, after ``wait_s``, another has it."""
        ...

    def unclaim(self, key: CacheKey, claim: str) -> None:
        """Give a claim back without having put the key; a put ends it by itself."""
        ...

    def nearest(
        self, namespace: Namespace, fingerprint: ModelFingerprint, segment: Segment, count: int, least: float,
        context: str | None = None,
    ) -> list[Nearby]:  # fmt: skip
        """Up to ``count`` texts held by anybody of the namespace whose cosine is ``least`` or more."""
        ...
