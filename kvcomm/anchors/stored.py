"""A pool on top of a store: bases outlive the process, and are read back when their text comes up again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch

from kvcomm.anchors.arriving import ArrivingKV
from kvcomm.anchors.catalogue import Catalogue
from kvcomm.anchors.guard import Guard
from kvcomm.anchors.index import Neighbour
from kvcomm.anchors.pool import MIN_INDEXED, Base, BasePool, Claim
from kvcomm.errors import AccessDenied, CorruptEntry, InvalidInput, KVCommError, StoreError, StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store.base import Attributes, Deadline, Entry, Handle, Priority, Store, empty_kv
from kvcomm.store.behind import WriteBehind
from kvcomm.store.blobs import DEFAULT_DEADLINE_S
from kvcomm.store.coordinator import DEFAULT_TERMS
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

log = logging.getLogger(__name__)
FLUSH_S = 60.0
MAX_UNSENT_BYTES = 1 << 30
"""Of KV that waits to be put; the tensors are the pool's, not copies."""
AGAIN_S = 10.0
"""What was lost on its way is not asked for again before that, so that planning again comes to an end."""
MAX_ARRIVING = 16
"""Bases on their way at once, each with a connection and a thread; others are waited for."""


class StoredPool(BasePool):
    """A BasePool whose bases are also put into a store, and come back from it.

    A fault of the store costs reuse and nothing else: it is counted in ``faults`` and logged, and the text is computed.

    Of a store that is one process's own, what it holds is listed once, and again at ``refresh``; puts are done when
    ``put`` returns; neighbours are found among the texts in memory. Where nodes meet in the store (``coordinator``),
    the pool follows it: what others put is found at once, what anybody deletes or drops goes from memory too. Puts then
    go out beside the calls, neighbours are asked for, and a call waits for a silent service once at most
    (kvcomm.store.coordinator.Terms).

    Args:
        device: where bases are used.
        frozen: find nothing that others put after this pool was made.
    """

    def __init__(
        self,
        namespace: Namespace,
        fingerprint: ModelFingerprint,
        store: Store,
        device: torch.device,
        max_bytes: int = 2 << 30,
        max_entries: int = 65536,
        frozen: bool = False,
    ) -> None:
        super().__init__(namespace, fingerprint, max_bytes, max_entries)
        self.store = store
        self.faults = 0
        self._device = device
        self._meeting = store.coordinator
        self._terms = DEFAULT_TERMS if self._meeting is None else self._meeting.terms
        self._claims = self._meeting is not None
        self.guard = Guard(watched=self._meeting is not None)
        self._catalogue = Catalogue(self._gone, self.guard, frozen)
        self._sender = WriteBehind(self._send, MAX_UNSENT_BYTES, "sender")
        self._lost: dict[CacheKey, float] = {}
        self._unfollow: Callable[[], None] = lambda: None
        if self._meeting is None:
            self.refresh()
            return
        try:
            self._unfollow = self._meeting.follow(namespace, fingerprint, self._catalogue)
        except StoreError as error:
            self._fault("following the store", error)
            return
        if not self._catalogue.wait(self._terms.silence_s):
            self._fault("listing the store", StoreError(f"nothing was heard of it in {self._terms.silence_s} s"))

    def refresh(self) -> int:
        """List the store again, so that bases put by other processes are found; returns how many it holds."""
        try:
            listed = list(self.store.entries(self.namespace, self.fingerprint))
        except StoreError as error:
            self._fault("listing the store", error)
            return 0
        self._catalogue.listed(listed)
        return len(listed)

    def put(self, segment: Segment, recipe: Recipe, kv: SegmentKV) -> bool:
        """As BasePool.put; what was added goes into the store too."""
        added = super().put(segment, recipe, kv)
        if added:
            key = CacheKey.of(self.namespace, self.fingerprint, segment, recipe)
            entry = Entry(segment, kv, Attributes(_priority(recipe)))
            if self._meeting is None:
                self._send((key, entry))
            elif not self._sender.add((key, entry), kv.nbytes):
                self._fault("keeping a base", StoreError(f"no room for {kv.nbytes} bytes more that wait to be put"))
        return added

    def flush(self) -> None:
        """Wait until what was put has been handed to the store. Raises DeadlineExceeded."""
        self._sender.flush(Deadline(FLUSH_S))

    def close(self) -> None:
        """Follow the store no more; the pool goes on with what it holds."""
        self._unfollow()

    def look_up(self, segments: Sequence[Segment]) -> None:
        """As BasePool.look_up: one round trip for what several nodes' store may have evicted, which is not told of."""
        if self._meeting is None or not self.guard.open:
            return
        listed = [key for segment in segments for key in self._catalogue.keys(segment.digest)]
        keys = [key for key in dict.fromkeys(listed) if key not in self._entries and key not in self._arriving]
        if len(keys) < 2:  # one is fetched, or missed, in a round trip itself
            return
        try:
            held = self.store.contains_many(keys, deadline_s=self._terms.silence_s)
            self.guard.succeeded()
        except StoreError as error:
            self._fault("looking bases up", error)
            return
        for key, there in zip(keys, held, strict=True):
            if not there:
                self._catalogue.lose(key)

    def bases(self, segment: Segment) -> list[Base]:
        """As BasePool.bases, after fetching those of this content that only the store holds."""
        for key in self._catalogue.keys(segment.digest):
            if key not in self._entries and key not in self._arriving:
                self._fetch(key, segment)
        return super().bases(segment)

    def neighbours(self, segment: Segment, count: int, least: float) -> list[Neighbour]:
        """As BasePool.neighbours; where nodes meet in the store, among the texts of all of them."""
        found = super().neighbours(segment, count, least)
        if self._meeting is None or not self.guard.open or len(segment) < MIN_INDEXED or not 1 <= count <= 64:
            return found
        try:
            theirs = self._meeting.nearest(self.namespace, self.fingerprint, segment, count, least)
        except StoreError as error:
            self._fault("asking for neighbours", error)
            return found
        known = {neighbour.segment.digest for neighbour in found}
        found += [Neighbour(t.segment, t.cosine) for t in theirs if t.segment.digest not in known]
        return sorted(found, key=lambda neighbour: -neighbour.cosine)[:count]

    def claim(self, wanted: Sequence[tuple[Segment, Recipe]]) -> Claim | None:
        """Have other nodes wait while a text is computed here, or wait for the one that computes it, at most its lease.

        None where there is nothing to end afterwards: the text is short, or held (perhaps only now), or nobody can be
        asked.

        Args:
            wanted: texts as they will be put, in this order; the last one is claimed.
        """
        segment, recipe = wanted[-1]
        meeting, short = self._meeting, len(segment) < self._terms.claim_tokens
        if meeting is None or short or not self._claims or self.bases(segment) or not self.guard.open:
            return None
        key = CacheKey.of(self.namespace, self.fingerprint, segment, recipe)
        try:
            held, claim = meeting.claim(key, self._terms.claim_s)
        except StoreError as error:
            self._claims = not isinstance(error, AccessDenied)  # a token that only reads computes without asking
            self._fault("claiming a text", error)
            return None
        if held:  # and what was put before it, which news may not have told yet
            for before, how in wanted:
                self._catalogue.hold(CacheKey.of(self.namespace, self.fingerprint, before, how))
        return Claim(lambda: self._unclaim(key, claim)) if claim else None

    def drop(self, which: Callable[[CacheKey], bool]) -> int:
        """Drop the bases here and the store's entries whose key ``which`` chooses, whichever process put them there.

        A call under way in another thread may put one back.

        Returns:
            how many there were, each key counted once.

        Raises:
            StoreError: the store could not list or delete; here they are gone.
        """
        here = self._drop(which)
        self.flush()
        self.store.flush()  # what was put and is on its way to a lower tier must not arrive afterwards
        stored = {entry.key for entry in self.store.entries(self.namespace, self.fingerprint) if which(entry.key)}
        for key in stored:
            self.store.delete(key)
        for key in stored | here:
            self._catalogue.lose(key)
        return len(stored | here)

    def _send(self, put: tuple[CacheKey, Entry]) -> None:
        key, entry = put
        if not self.guard.open:
            self._fault("keeping a base", StoreError("the store is silent"))
            return
        try:
            kv = _on(entry.kv, torch.device("cpu"))
            self.store.put(key, Entry(entry.segment, kv, entry.attributes))
            self._catalogue.hold(key, entry.attributes.group)
            self.guard.succeeded()
        except StoreError as error:
            self._fault("keeping a base", error)

    def _fetch(self, key: CacheKey, segment: Segment) -> None:
        if not self.guard.open or self._lost.get(key, 0.0) > time.monotonic():
            return
        losses = self._catalogue.losses
        try:
            deadline_s = DEFAULT_DEADLINE_S if self._meeting is None else self._terms.silence_s
            handle = self.store.get(key, deadline_s=deadline_s)
            self.guard.succeeded()
            if handle is not None and self._let_arrive(key, segment, handle):
                if losses != self._catalogue.losses and key not in self._catalogue:
                    self._gone([key])
                return
            if handle is not None:
                with handle:
                    if handle.segment.token_ids == segment.token_ids:
                        super().put(segment, key.recipe, _on(self._read(handle), self._device))
                        if losses != self._catalogue.losses and key not in self._catalogue:
                            self._gone([key])  # deleted while it was on its way
                        return
        except (StoreError, InvalidInput) as error:
            self._fault("fetching a base", error)
            if not isinstance(error, (CorruptEntry, InvalidInput)):
                return
        self._catalogue.lose(key)

    def _let_arrive(self, key: CacheKey, segment: Segment, handle: Handle) -> bool:
        """Have a base come in the background, if its layers come one by one and are used in host memory."""
        with self._lock:
            room = len(self._arriving) < MAX_ARRIVING
        alike = handle.segment.token_ids == segment.token_ids
        if not (handle.arrives and room and alike and self._device.type == "cpu"):
            return False
        deadline = Deadline(DEFAULT_DEADLINE_S if self._meeting is None else self._terms.fetch_s)
        kv = ArrivingKV(self.fingerprint, len(segment), deadline)
        kv.at_end(lambda error: self._ended(key, error))
        if self.expect(segment, key.recipe, kv):
            threading.Thread(target=_fill, args=(handle, kv, deadline), name="arriving", daemon=True).start()
        else:
            handle.release()
        return True

    def _ended(self, key: CacheKey, error: KVCommError | None) -> None:
        """A base has come, or was lost on its way."""
        if error is None:
            return
        if isinstance(error, (CorruptEntry, InvalidInput)):
            self._catalogue.lose(key)
        now = time.monotonic()
        with self._lock:
            self._lost = {lost: until for lost, until in self._lost.items() if until > now}
            self._lost[key] = now + AGAIN_S
        self._fault("fetching a base", error)

    def _read(self, handle: Handle) -> SegmentKV:
        """Layer by layer where others share the store: each must come before a silence ends, all within ``fetch_s``."""
        if self._meeting is None:
            return handle.read()
        out, deadline = empty_kv(self.fingerprint, len(handle.segment)), Deadline(self._terms.fetch_s)
        for layer in range(self.fingerprint.n_layers):
            if not deadline.left():
                raise deadline.error(f"fetching a base of {handle.nbytes} bytes")
            handle.layer_into(layer, out.keys[layer], out.values[layer])
        return out

    def _find(self, key: CacheKey, segment: Segment | None = None) -> Base | None:
        """As BasePool, after fetching what only the store holds."""
        held = key in self._entries or key in self._arriving
        if segment is not None and not held and key in self._catalogue:
            self._fetch(key, segment)
        return super()._find(key, segment)

    def _gone(self, keys: Collection[CacheKey]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)
                self._no_longer(key)

    def _unclaim(self, key: CacheKey, claim: str) -> None:
        """End a claim unless the base is here, and so on its way to the store, which ends it."""
        if key not in self._entries and self._meeting is not None and self.guard.open:
            with suppress(StoreError):
                self._meeting.unclaim(key, claim)

    def _fault(self, doing: str, error: KVCommError) -> None:
        self.guard.failed(error)
        with self._lock:
            self.faults += 1
        log.warning("%s failed, going on without: %s", doing, error)


def _fill(handle: Handle, kv: ArrivingKV, deadline: Deadline) -> None:
    """Read a base, each layer before a silence ends, all before the deadline."""
    try:
        with handle:
            for _ in handle.read_layers(kv.rooms, deadline):
                kv.arrive()
    except (StoreError, InvalidInput) as error:
        kv.lose(error)
    except BaseException as error:
        kv.lose(StoreUnavailable(f"reading failed ({type(error).__name__}); compute the text"))
        raise


def _on(kv: SegmentKV, device: torch.device) -> SegmentKV:
    return SegmentKV(kv.keys.to(device), kv.values.to(device))


def _priority(recipe: Recipe) -> Priority:
    """Fixed text of a template (``agent/#n``) is kept longest, what fills slots is history."""
    return Priority.SYSTEM if "/#" in recipe.context else Priority.HISTORY
