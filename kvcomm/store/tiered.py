"""A store made of stores, the fastest first: hot entries move up, cold ones down, a tier's fault costs time only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvcomm.errors import InvalidInput, StoreError, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.base import (
    DEFAULT_LEASE_S,
    Deadline,
    Entry,
    Handle,
    Listing,
    Receipt,
    Store,
    StoreStats,
)
from kvcomm.store.behind import WriteBehind
from kvcomm.store.blobs import DEFAULT_DEADLINE_S
from kvcomm.store.flight import Gate, SingleFlight
from kvcomm.store.memory import MemoryStore
from kvcomm.store.placement import HitCounter, Placement, Promotion, WriteThrough
from kvcomm.store.tally import Tally
from kvcomm.types import ModelFingerprint, Namespace

T = TypeVar("T")
OnDrop = Callable[[Namespace, str], None]


class TieredStore(Store):
    """Tiers as one. It owns them: close it, not them, and put only through it.

    Deletions wait for puts to end, and keep new ones out until every tier is done; the count that they return is the
    largest of any tier. A get asks the tiers in order. A tier that fails is counted and passed over; only if no other
    tier has the entry is its error raised, so that a caller never takes a fault for a miss. Blobs live in the last.

    Args:
        tiers: fastest first; memory tiers hand what they evict to the next one.
        placement: into which tiers a put goes, and whether before it returns.
        promotion: when a hit in a lower tier moves the entry up.
        on_drop: called with (namespace, group) when a group is dropped and before anything new can be put, so that
            anchors learned for it go at once too.
        max_behind_bytes: most bytes waiting to be written behind; beyond it a put writes for itself.

    Raises:
        InvalidInput: no tiers.
    """

    def __init__(
        self, tiers: Sequence[Store], *, placement: Placement | None = None, promotion: Promotion | None = None,
        on_drop: Sequence[OnDrop] = (), max_behind_bytes: int = 1 << 28, name: str = "tiered",
    ) -> None:  # fmt: skip
        if not tiers:
            raise InvalidInput("no tiers were given; pass at least one store")
        self.name = name
        self.tiers = tuple(tiers)
        self.blobs = self.tiers[-1].blobs
        self.coordinator = self.tiers[-1].coordinator
        self._placement = placement or WriteThrough()
        self.durable = isinstance(self._placement, WriteThrough) and self.tiers[-1].durable
        self._hits = HitCounter(promotion or Promotion())
        self._on_drop = tuple(on_drop)
        self._gate, self._flights, self._tally = Gate(), SingleFlight(), Tally()
        self._behind = WriteBehind(self._write_behind, max_behind_bytes, "kvcomm-write-behind")
        self._closed = False
        for place, tier in enumerate(self.tiers[:-1]):
            if isinstance(tier, MemoryStore):
                tier.on_evict = self._demoter(place + 1)

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        self._check_open()
        entry.check(key)
        deadline = Deadline(deadline_s)
        while True:
            with self._flights.flight(key.digest, deadline) as leading:
                if leading:
                    with self._gate.shared(deadline):
                        return self._put(key, entry, deadline)

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        self._check_open()
        deadline = Deadline(deadline_s)
        found = self._first(key, lease_s, deadline, self.tiers[:1])
        if found is None and len(self.tiers) > 1:
            with self._flights.flight(key.digest, deadline) as leading:
                # One that waited finds the entry where the one that flew put it, or reads it beside the others.
                found = self._first(key, lease_s, deadline, self.tiers)
                if found is not None and leading:
                    found = self._promote(key, *found, lease_s, deadline)
        self._tally.add(key.namespace.name, "misses" if found is None else "hits")
        if found is None:
            return None
        self._tally.add(key.namespace.name, f"hits.{self.tiers[found[0]].name}")
        return found[1]

    def get_or_compute(
        self, key: CacheKey, compute: Callable[[], Entry], *, lease_s: float = DEFAULT_LEASE_S,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Handle:  # fmt: skip
        """The entry; on a miss one thread computes and puts it while the others wait for it.

        Raises:
            StoreUnavailable: it was computed and could not be kept.
        """
        deadline = Deadline(deadline_s)
        while True:
            handle = self.get(key, lease_s=lease_s, deadline_s=max(deadline.left(), 0.001))
            if handle is not None:
                return handle
            with self._flights.flight("compute " + key.digest, deadline) as leading:
                if leading:
                    self.put(key, compute(), deadline_s=max(deadline.left(), 0.001))
            if not deadline.left():
                raise deadline.error(f"computing {key}")

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._check_open()
        return any(self._each(lambda tier: tier.contains(key, deadline_s=deadline_s), until=True))

    def contains_many(self, keys: Sequence[CacheKey], *, deadline_s: float = DEFAULT_DEADLINE_S) -> list[bool]:
        self._check_open()
        deadline, missing = Deadline(deadline_s), dict.fromkeys(keys)

        def ask(tier: Store) -> bool:
            asked = list(missing)
            for key, there in zip(asked, tier.contains_many(asked, deadline_s=left(deadline)), strict=True):
                if there:
                    del missing[key]
            return not missing

        self._each(ask, until=True)
        return [key not in missing for key in keys]

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._check_open()
        with self._gate.alone(Deadline(deadline_s)):
            return any(self._each(lambda tier: tier.delete(key, deadline_s=deadline_s), strict=True))

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._check_open()
        with self._gate.alone(Deadline(deadline_s)):
            return max(self._each(lambda tier: tier.delete_namespace(namespace, deadline_s=deadline_s), strict=True))

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._check_open()
        with self._gate.alone(Deadline(deadline_s)):
            try:
                return max(self._each(lambda t: t.delete_group(namespace, group, deadline_s=deadline_s), strict=True))
            finally:
                for call in self._on_drop:
                    call(namespace, group)

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._check_open()
        return any(self._each(lambda tier: tier.touch(key, ttl_s=ttl_s, deadline_s=deadline_s)))

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        self._check_open()
        seen: set[str] = set()
        for tier in self.tiers:  # the way that entries move, so none is missed while it moves
            for listing in tier.entries(namespace, fingerprint):
                if listing.key.digest not in seen:
                    seen.add(listing.key.digest)
                    yield listing

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        self._check_open()
        tiers = tuple(tier.stats(namespace) for tier in self.tiers)
        last = tiers[-1]
        counters = self._tally.read(None if namespace is None else namespace.name)
        largest = max(tiers, key=lambda stats: stats.entries)
        return StoreStats(
            self.name, largest.entries, largest.nbytes, last.max_bytes, last.max_entries, counters, tiers
        )  # fmt: skip

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._check_open()
        deadline = Deadline(deadline_s)
        self._behind.flush(deadline)
        for tier in self.tiers:
            tier.flush(deadline_s=max(deadline.left(), 0.001))

    def close(self) -> None:
        if self._closed:
            return
        self._behind.close()
        self._closed = True
        for tier in self.tiers:
            tier.close()

    def _put(self, key: CacheKey, entry: Entry, deadline: Deadline) -> Receipt:
        places = self._placement.places(key.namespace, entry.attributes, len(self.tiers))
        chosen = places.now
        held = [place for place, tier in enumerate(self.tiers) if self._holds(tier, key, deadline)]
        if held:
            self._tally.add(key.namespace.name, "existed")
            # The first put won. A tier below it that lacks the entry, after a fault for instance, gets those bytes.
            lacking = tuple(place for place in chosen if place > max(held))
            if lacking:
                self._copy_down(key, lacking, deadline)
            return Receipt(False, any(self.tiers[place].durable for place in (*held, *lacking)), entry.kv.nbytes)
        best: Receipt | None = None
        fault: StoreError | None = None
        for place in sorted(chosen, reverse=True):
            try:
                receipt = self.tiers[place].put(key, entry, deadline_s=left(deadline))
            except StoreError as error:
                self._fault(key, self.tiers[place], error)
                fault = error
                continue
            if not receipt.stored and best is None:
                self._tally.add(key.namespace.name, "existed")
                return receipt
            best = receipt if best is None or receipt.durable else best
        if best is None:
            raise fault or StoreUnavailable(f"the placement chose no tier for {key}; choose at least one")
        self._tally.add(key.namespace.name, "puts")
        if places.later and not self._behind.add((key, places.later), entry.kv.nbytes):
            self._copy_down(key, places.later, deadline)
        return Receipt(True, best.durable, best.nbytes)

    def _holds(self, tier: Store, key: CacheKey, deadline: Deadline) -> bool:
        try:
            return tier.contains(key, deadline_s=left(deadline))
        except StoreError as error:
            self._fault(key, tier, error)
            return False

    def _first(
        self, key: CacheKey, lease_s: float, deadline: Deadline, tiers: Sequence[Store]
    ) -> tuple[int, Handle] | None:
        fault: StoreError | None = None
        for place, tier in enumerate(tiers):
            try:
                handle = tier.get(key, lease_s=lease_s, deadline_s=left(deadline))
            except StoreError as error:
                self._fault(key, tier, error)
                fault = error
                continue
            if handle is not None:
                return place, handle
        if fault is not None and len(tiers) == len(self.tiers):
            raise fault
        return None

    def _promote(
        self, key: CacheKey, place: int, handle: Handle, lease_s: float, deadline: Deadline
    ) -> tuple[int, Handle]:
        """Copy a hit up by one tier if it is due; the handle to use. Failing to is counted and no more."""
        if place == 0 or not self._hits.hit(key.digest, handle.attributes.priority):
            return place, handle
        upper = self.tiers[place - 1]
        try:
            with self._gate.shared(deadline):
                if not self.tiers[place].contains(key, deadline_s=left(deadline)):
                    return place, handle
                upper.put(key, handle.entry(), deadline_s=min(left(deadline), 1.0))
            better = upper.get(key, lease_s=lease_s, deadline_s=left(deadline))
        except StoreError as error:
            self._fault(key, upper, error)
            return place, handle
        if better is None:
            return place, handle
        self._tally.add(key.namespace.name, "promotions")
        handle.release()
        return place, better

    def _demoter(self, place: int) -> Callable[[Handle], None]:
        """What a memory tier calls with each entry that it is about to evict; the caller holds the gate."""

        def demote(handle: Handle) -> None:
            lower = self.tiers[place]
            try:
                if not lower.contains(handle.key) and lower.put(handle.key, handle.entry()).stored:
                    self._tally.add(handle.key.namespace.name, "demotions")
            except StoreError as error:
                self._fault(handle.key, lower, error)

        return demote

    def _write_behind(self, item: tuple[CacheKey, tuple[int, ...]]) -> None:
        (key, places), deadline = item, Deadline(DEFAULT_DEADLINE_S)
        try:
            with self._gate.shared(deadline):
                self._copy_down(key, places, deadline)
        except StoreError as error:
            self._fault(key, self.tiers[places[-1]], error)

    def _copy_down(self, key: CacheKey, places: Sequence[int], deadline: Deadline) -> None:
        """Put what a faster tier holds into ``places``, the lowest first; faults are counted."""
        try:
            found = self._first(key, DEFAULT_LEASE_S, deadline, self.tiers[: min(places)])
        except StoreError:
            return
        if found is None:
            return
        with found[1] as handle:
            entry = handle.entry()
        for place in sorted(places, reverse=True):
            try:
                self.tiers[place].put(key, entry, deadline_s=left(deadline))
            except StoreError as error:
                self._fault(key, self.tiers[place], error)

    def _each(self, call: Callable[[Store], T], *, strict: bool = False, until: bool = False) -> list[T]:
        """``call`` on every tier, on those below a failing one too; ``strict`` raises its error afterwards."""
        results: list[T] = []
        fault: StoreError | None = None
        for tier in self.tiers:
            try:
                results.append(call(tier))
            except StoreError as error:
                self._tally.add("", f"faults.{tier.name}")
                fault = error
                continue
            if until and results[-1]:
                break
        if fault is not None and (strict or not results):
            raise fault
        return results

    def _fault(self, key: CacheKey, tier: Store, error: StoreError) -> None:
        self._tally.add(key.namespace.name, f"faults.{tier.name}.{type(error).__name__}")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"store {self.name!r} is closed; open a new one")


def left(deadline: Deadline) -> float:
    """What is left, as a tier's deadline."""
    return max(deadline.left(), 0.001)
