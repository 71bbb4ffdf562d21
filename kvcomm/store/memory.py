"""Entries in one pooled range of memory, touched in advance: host memory, pinned host memory, or a device's.

The pool is one uint8 tensor, so a CUDA pool is the same code with ``device="cuda"``. Copies run outside the lock.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from kvcomm.errors import StoreError, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.arena import Extents, aligned
from kvcomm.store.base import (
    DEFAULT_LEASE_S,
    Deadline,
    Entry,
    Handle,
    Listing,
    Receipt,
    Store,
    StoreStats,
    check_lease,
)
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, Blobs, MemoryBlobs
from kvcomm.store.eviction import UNLIMITED, Candidate, FrequencyRecency, Limits, Policy, Quota, Usage, order
from kvcomm.store.ledger import Ledger
from kvcomm.store.memory_slot import MemoryHandle, Slot, allocate, copy_in
from kvcomm.store.tally import Tally
from kvcomm.types import ModelFingerprint, Namespace


class MemoryStore(Store):
    """A pool of ``max_bytes``.

    Args:
        device: where the pool lies; ``pinned`` page-locks a host pool, for fast copies to a device.
        quota: limit of each namespace that ``quotas`` does not name.
        policy: who is evicted first within a priority class.
        on_evict: called with a pinned handle of each entry about to be evicted, to keep it in a lower tier.
        clock: Unix seconds, for times to live.

    Raises:
        InvalidInput: a limit is not positive.
    """

    def __init__(
        self, max_bytes: int, *, max_entries: int = UNLIMITED, device: str | torch.device = "cpu", pinned: bool = False,
        quota: Quota | None = None, quotas: Mapping[str, Quota] | None = None, policy: Policy | None = None,
        on_evict: Callable[[Handle], None] | None = None, name: str = "memory", clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.name, self.durable = name, False
        self.blobs: Blobs = MemoryBlobs()
        self._extents = Extents(max_bytes)
        self._limits = Limits(Quota(self._extents.capacity, max_entries), quota or Quota(), dict(quotas or {}))
        self._policy = policy or FrequencyRecency()
        self._clock = clock
        self.on_evict = on_evict
        pool = torch.empty(self._extents.capacity, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._pool = pool.fill_(0)
        self._slots: dict[str, Slot] = {}
        self._groups: dict[tuple[str, str], set[str]] = {}
        self._expiry: list[tuple[float, str]] = []
        self._leaving: list[Slot] = []
        self._ledger = Ledger()
        self._tally = Tally()
        self._changed = threading.Condition(threading.Lock())
        self._closed = False

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        entry.check(key)
        deadline = Deadline(deadline_s)
        slot = Slot(key, entry, self._clock())
        with self._locked(deadline):
            while (held := self._slots.get(slot.name)) is not None and not held.expired(self._clock()):
                if held.ready:
                    self._tally.add(slot.namespace, "existed")
                    return Receipt(False, False, held.nbytes)
                self._wait(deadline)
            if held is not None:
                self._forget(held, "expired")
            self._slots[slot.name] = slot
            try:
                self._reserve(slot, deadline)
            except BaseException:
                self._drop(slot)
                raise
        try:
            copy_in(self._pool, slot, entry.kv)
        except BaseException:
            with self._changed:
                self._drop(slot)
            raise
        with self._changed:
            if self._slots.get(slot.name) is not slot:
                self._drop(slot)
                raise StoreUnavailable(f"{key} was deleted while it was being put; put it again if it is still wanted")
            self._publish(slot)
        return Receipt(True, False, slot.nbytes)

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        check_lease(lease_s)
        with self._locked(Deadline(deadline_s)):
            slot = self._find(key)
            if slot is None:
                self._tally.add(key.namespace.name, "misses")
                return None
            self._ledger.use(slot.namespace, slot.priority, slot.name, self._clock())
            self._tally.add(slot.namespace, "hits")
            return MemoryHandle(self, slot, time.monotonic() + lease_s)

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        with self._locked(Deadline(deadline_s)):
            return self._find(key) is not None

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        with self._locked(Deadline(deadline_s)):
            slot = self._slots.get(key.digest)
            if slot is None or slot.key != key:
                return False
            self._forget(slot, "deleted")
            return True

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        with self._locked(Deadline(deadline_s)):
            slots = [s for s in self._slots.values() if s.namespace == namespace.name]
            for slot in slots:
                self._forget(slot, "deleted")
        self.blobs.delete_namespace(namespace)
        return len(slots)

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        with self._locked(Deadline(deadline_s)):
            names = list(self._groups.get((namespace.name, group), ()))
            for name in names:
                self._forget(self._slots[name], "deleted")
            return len(names)

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        with self._locked(Deadline(deadline_s)):
            slot = self._find(key)
            if slot is None:
                return False
            now = self._clock()
            self._ledger.use(slot.namespace, slot.priority, slot.name, now)
            if ttl_s is not None and slot.expires_s is not None:
                slot.expires_s = max(slot.expires_s, now + ttl_s)
            return True

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        with self._changed:
            slots = [s for s in self._slots.values() if s.ready and not s.expired(self._clock())]
        for slot in slots:
            if namespace in (None, slot.key.namespace) and fingerprint in (None, slot.key.fingerprint):
                yield slot.listing()

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        with self._changed:
            usage = dict(self._ledger.usage)
        quota = self._limits.total if namespace is None else self._limits.of(namespace.name)
        used = list(usage.values()) if namespace is None else [usage.get(namespace.name, Usage())]
        counters = self._tally.read(None if namespace is None else namespace.name)
        entries, nbytes = sum(u.entries for u in used), sum(u.nbytes for u in used)
        return StoreStats(self.name, entries, nbytes, quota.max_bytes, quota.max_entries, counters)

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._check_open()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._slots.clear()
            self._pool = torch.empty(0, dtype=torch.uint8)
            self._changed.notify_all()

    # What MemoryHandle uses.

    def begin_copy(self, slot: Slot) -> torch.Tensor:
        """The pool, while a copy out of ``slot`` runs; the slot cannot be freed before ``end_copy``."""
        with self._changed:
            self._check_open()
            if slot.freed:
                raise StoreUnavailable(f"the lease on {slot.key} ended and its memory was reused; get it again")
            slot.copies += 1
            return self._pool

    def end_copy(self, slot: Slot) -> None:
        """End of a copy."""
        with self._changed:
            slot.copies -= 1
            self._changed.notify_all()

    def unpin(self, slot: Slot, pin: int) -> None:
        """End of a handle."""
        with self._changed:
            slot.leases.pop(pin, None)
            self._changed.notify_all()

    # The rest holds the lock.

    def _find(self, key: CacheKey) -> Slot | None:
        slot = self._slots.get(key.digest)
        if slot is None or not slot.ready or slot.key != key:
            return None
        if slot.expired(self._clock()):
            self._forget(slot, "expired")
            return None
        return slot

    def _reserve(self, slot: Slot, deadline: Deadline) -> None:
        slot.nbytes = aligned(slot.nbytes)
        busy: set[str] = set()
        while True:
            self._sweep()
            payers = self._limits.pressure(slot.namespace, slot.nbytes, self._ledger.usage)
            if not payers:
                if allocate(self._extents, slot):
                    break
                self._tally.add(slot.namespace, "fragmented")
                payers = frozenset(self._ledger.usage)
            self._evict_one(payers, busy, deadline, slot)
        self._ledger.charge(slot.namespace, slot.nbytes, 1)
        slot.charged = True

    def _evict_one(self, payers: frozenset[str], busy: set[str], deadline: Deadline, wanted: Slot) -> None:
        for depth in (self._policy.depth, len(self._slots)):
            for candidate in self._candidates(payers, depth):
                slot = self._slots[candidate.name]
                if slot.pinned() or slot.name in busy:
                    continue
                if self.on_evict is None or self._demote(slot, busy):
                    self._forget(slot, "evictions")
                return
        waiting = any(s.pinned() or (s.charged and not s.ready) for s in [*self._slots.values(), *self._leaving])
        if not waiting:
            raise StoreUnavailable(
                f"tier {self.name!r} has no room for {wanted.nbytes} bytes of {wanted.key}; raise its limits"
            )
        busy.clear()
        self._wait(deadline, f"room for {wanted.nbytes} bytes in tier {self.name!r}, whose entries are pinned,")

    def _candidates(self, payers: frozenset[str], depth: int) -> Iterator[Candidate]:
        for same_class in self._ledger.oldest(payers, depth):
            yield from order(same_class, self._policy, self._clock())

    def _demote(self, slot: Slot, busy: set[str]) -> bool:
        """Give the slot to a lower tier, without the lock; False if it should be looked at again."""
        hook = self.on_evict
        handle = MemoryHandle(self, slot, time.monotonic() + DEFAULT_LEASE_S)
        busy.add(slot.name)
        self._changed.release()
        try:
            if hook is not None:
                hook(handle)
        except StoreError:
            self._tally.add(slot.namespace, "demotion_faults")
        finally:
            self._changed.acquire()
            slot.leases.pop(handle.pin, None)
        return not slot.freed and not slot.pinned() and self._slots.get(slot.name) is slot

    def _publish(self, slot: Slot) -> None:
        self._ledger.charge(slot.namespace, -slot.nbytes, -1)
        now = self._clock()
        self._ledger.add(Candidate(slot.name, slot.namespace, slot.priority, slot.nbytes, now, now, 0))
        slot.ready = True
        if slot.group:
            self._groups.setdefault((slot.namespace, slot.group), set()).add(slot.name)
        if slot.expires_s is not None:
            heapq.heappush(self._expiry, (slot.expires_s, slot.name))
        self._tally.add(slot.namespace, "puts")
        self._changed.notify_all()

    def _forget(self, slot: Slot, event: str) -> None:
        """Take a slot out of every list; its bytes are freed, and no longer counted, once nothing pins them."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]
        if slot.ready:
            self._ledger.remove(slot.namespace, slot.priority, slot.name)
            self._ledger.charge(slot.namespace, slot.nbytes, 1)
            if slot.group:
                names = self._groups[slot.namespace, slot.group]
                names.discard(slot.name)
                if not names:
                    del self._groups[slot.namespace, slot.group]
            self._leaving.append(slot)
        slot.ready = False
        self._tally.add(slot.namespace, event)
        self._sweep()
        self._changed.notify_all()

    def _drop(self, slot: Slot) -> None:
        """End a put that failed: nothing of it stays."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]
        self._free(slot)
        self._changed.notify_all()

    def _free(self, slot: Slot) -> None:
        for offset, nbytes in slot.pieces:
            self._extents.free(offset, nbytes)
        slot.freed = True
        if slot.charged:
            self._ledger.charge(slot.namespace, -slot.nbytes, -1)

    def _sweep(self) -> None:
        """Free what left and is no longer pinned, and forget what outlived its time."""
        for slot in [s for s in self._leaving if not s.pinned()]:
            self._leaving.remove(slot)
            self._free(slot)
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            _, name = heapq.heappop(self._expiry)
            found = self._slots.get(name)
            if found is None or not found.ready or found.expires_s is None:
                continue
            if found.expired(now):
                self._forget(found, "expired")
            else:
                heapq.heappush(self._expiry, (found.expires_s, name))

    def _wait(self, deadline: Deadline, what: str = "another put of the same key") -> None:
        left = deadline.left()
        if left <= 0:
            raise deadline.error(what)
        self._changed.wait(min(left, 0.05))
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"tier {self.name!r} is closed; open a new one")

    @contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        if not self._changed.acquire(timeout=deadline.left()):
            raise deadline.error(f"waiting for the lock of tier {self.name!r}")
        try:
            self._check_open()
            yield
        finally:
            self._changed.release()
