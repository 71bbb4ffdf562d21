"""Limits, fair shares and the order of eviction: values and pure functions, the same for memory and disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvcomm.errors import InvalidInput, StoreUnavailable

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Usage:
    """What a namespace holds now, reservations included."""

    nbytes: int = 0
    entries: int = 0

    def plus(self, nbytes: int, entries: int) -> Usage:
        """The usage after adding (or, negative, removing) that much."""
        return Usage(self.nbytes + nbytes, self.entries + entries)


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that may be held."""

    max_bytes: int = UNLIMITED
    max_entries: int = UNLIMITED

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_entries < 1:
            raise InvalidInput(f"quota of {self.max_bytes} bytes, {self.max_entries} entries is not positive; raise it")

    def holds(self, usage: Usage) -> bool:
        """Whether ``usage`` is within it."""
        return usage.nbytes <= self.max_bytes and usage.entries <= self.max_entries


def total(usage: Mapping[str, Usage]) -> Usage:
    """What all namespaces hold together."""
    return Usage(sum(used.nbytes for used in usage.values()), sum(used.entries for used in usage.values()))


@dataclass(frozen=True)
class Limits:
    """Limits of one tier: of all together, and of each namespace.

    Attributes:
        total: of the tier.
        namespace: of each namespace that ``by_name`` does not list.
        by_name: quotas of single namespaces.
    """

    total: Quota
    namespace: Quota = Quota()
    by_name: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, namespace: str) -> Quota:
        """The quota of one namespace."""
        return self.by_name.get(namespace, self.namespace)

    def pressure(self, namespace: str, nbytes: int, usage: Mapping[str, Usage]) -> frozenset[str]:
        """Namespaces that something must be evicted from before ``nbytes`` more fit; empty if they fit now.

        A namespace over its own quota pays itself. Over the total, those pay that hold more than their fair share:
        the total divided by the namespaces present. So a noisy namespace cannot push another below its share.

        Raises:
            StoreUnavailable: it can never fit.
        """
        own = self.of(namespace)
        limit = min(own.max_bytes, self.total.max_bytes)
        if nbytes > limit:
            raise StoreUnavailable(
                f"an entry of {nbytes} bytes exceeds the limit of {limit} bytes for namespace {namespace!r}; "
                "raise the limit or split the segment"
            )
        after = usage.get(namespace, Usage()).plus(nbytes, 1)
        if not own.holds(after):
            return frozenset({namespace})
        if self.total.holds(total(usage).plus(nbytes, 1)):
            return frozenset()
        present = {name: used for name, used in usage.items() if used.entries} | {namespace: after}
        share = Quota(max(1, self.total.max_bytes // len(present)), max(1, self.total.max_entries // len(present)))
        over = frozenset(name for name, used in present.items() if not share.holds(used) and name in usage)
        return over or frozenset({namespace})


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that could be evicted. Times are Unix seconds; ``name`` is opaque, but equal for equal keys."""

    name: str
    namespace: str
    priority: int
    nbytes: int
    created_s: float
    accessed_s: float
    uses: int


class Policy(Protocol):
    """Decides who goes first within one priority class: the lowest rank.

    ``depth`` is how many of the least recently used entries of a class it wants to see.
    """

    @property
    def depth(self) -> int: ...

    def rank(self, candidate: Candidate, now_s: float) -> float:
        """Worth of keeping the candidate; the lowest is evicted first."""
        ...


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """The one unused for longest goes."""

    depth: int = 4

    def rank(self, candidate: Candidate, now_s: float) -> float:
        """Time of the last use."""
        return candidate.accessed_s


@dataclass(frozen=True)
class FrequencyRecency:
    """Each doubling of uses is worth ``doubling_s`` seconds of recency: a scan cannot push out what is used often."""

    doubling_s: float = 600.0
    depth: int = 16

    def rank(self, candidate: Candidate, now_s: float) -> float:
        """Time of the last use, later for what was used often."""
        return candidate.accessed_s + self.doubling_s * math.log2(1 + candidate.uses)


def order(candidates: Iterable[Candidate], policy: Policy, now_s: float) -> list[Candidate]:
    """Candidates, first to go first: by priority class, then as ``policy`` ranks them."""
    return sorted(candidates, key=lambda c: (c.priority, policy.rank(c, now_s), c.name))
