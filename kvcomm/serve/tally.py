"""What the service counts while it works: by tier, namespace and operation, in bounded memory and without content."""

from __future__ import annotations

import heapq
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

TIERS = ("memory", "disk", "peer")
LOOK_UP = "open"
OPERATIONS = frozenset(
    (
        LOOK_UP, "read", "release", "suspect", "contains", "contains_many", "entries", "stats", "watch", "health",
        "put", "begin", "part", "commit", "abort", "delete", "delete_group", "delete_namespace", "touch", "flush",
        "claim", "unclaim", "blob_read", "blob_write", "blob_delete", "blob_names", "nearest", "sums_open",
        "sums_put", "sums_others", "sums_forget", "sums_retire", "follow",
    )
)  # fmt: skip
REASONS = frozenset(
    ("overloaded", "protocol", "deadline", "unavailable", "denied", "corrupt", "fingerprint", "invalid", "superseded")
)
OTHER = "other"
MAX_NAMESPACES = 64
SLOWEST = 20
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Latency:
    """A histogram of seconds; ``counts`` has one place for each of BUCKETS_S and one for what is above."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds
        self.calls += 1

    def quantile(self, share: float) -> float:
        """Upper edge, in seconds, of the bucket that holds the call at ``share``; infinity above the last."""
        wanted, seen = share * self.calls, 0
        for edge, count in zip((*BUCKETS_S, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return edge
        return 0.0


@dataclass(frozen=True, order=True)
class Slow:
    """A slow call: what and for whom, not what about."""

    seconds: float
    at_s: float
    operation: str
    namespace: str
    nbytes: int


@dataclass
class Traffic:
    """Counts of one namespace."""

    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    misses: int = 0
    received: int = 0
    sent: int = 0


class Tally:
    """Counts of a service since its start. Safe to call from threads; names that it does not know count as ``other``.

    The first 64 namespaces are counted each by itself, those that come later together, as ``other``.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.started_s = clock()
        self.lock = threading.RLock()
        self.traffic: dict[str, Traffic] = {}
        self.latency: dict[str, Latency] = {}
        self.refusals: dict[str, int] = {}
        self._slowest: list[Slow] = []

    def record(
        self, call: str, namespace: str, outcome: str, seconds: float, received: int, sent: int, tier: str = "disk"
    ) -> None:
        """One call, with all that there is to count of it.

        Args:
            outcome: ``ok``, ``miss`` or one of REASONS.
            seconds: to the end of its answer.
            received, sent: bytes.
            tier: where an entry that was looked up was found.
        """
        self.call(call, namespace, seconds, received + sent)
        self.moved(namespace, received=received, sent=sent)
        if outcome not in ("ok", "miss"):
            self.refused(outcome)
        elif call == LOOK_UP:
            self.miss(namespace) if outcome == "miss" else self.hit(namespace, tier)

    def hit(self, namespace: str, tier: str) -> None:
        """An entry was found in ``tier``, one of TIERS."""
        with self.lock:
            found = self._of(namespace).hits
            found[tier if tier in found else TIERS[-1]] += 1

    def miss(self, namespace: str) -> None:
        """An entry was not found."""
        with self.lock:
            self._of(namespace).misses += 1

    def moved(self, namespace: str, *, received: int = 0, sent: int = 0) -> None:
        """Bytes came from or went to clients."""
        with self.lock:
            traffic = self._of(namespace)
            traffic.received += received
            traffic.sent += sent

    def refused(self, reason: str) -> None:
        """A request was refused; ``reason`` is one of REASONS."""
        reason = reason if reason in REASONS else OTHER
        with self.lock:
            self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def call(self, operation: str, namespace: str, seconds: float, nbytes: int = 0) -> None:
        """A request ended after ``seconds``, well or not; ``operation`` is one of OPERATIONS."""
        operation = operation if operation in OPERATIONS else OTHER
        with self.lock:
            self.latency.setdefault(operation, Latency()).add(seconds)
            slow = Slow(seconds, self.clock(), operation, self._name(namespace), nbytes)
            (heapq.heappush if len(self._slowest) < SLOWEST else heapq.heappushpop)(self._slowest, slow)

    def slowest(self) -> tuple[Slow, ...]:
        """The 20 slowest calls since the start, the slowest first."""
        with self.lock:
            return tuple(sorted(self._slowest, reverse=True))

    def forget(self, namespace: str) -> None:
        """Drop the counts of a namespace that was deleted."""
        with self.lock:
            self.traffic.pop(namespace, None)
            self._slowest = [s for s in self._slowest if s.namespace != namespace]
            heapq.heapify(self._slowest)

    def _name(self, namespace: str) -> str:
        return namespace if namespace in self.traffic or len(self.traffic) < MAX_NAMESPACES else OTHER

    def _of(self, namespace: str) -> Traffic:
        return self.traffic.setdefault(self._name(namespace), Traffic())
