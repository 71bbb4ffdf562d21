"""A pool on top of a store: bases outlive the process, and are read back when their text comes up again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from kvcomm.anchors.pool import Base, BasePool
from kvcomm.errors import CorruptEntry, InvalidInput, KVCommError, StoreError
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store.base import Attributes, Entry, Priority, Store
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

log = logging.getLogger(__name__)


class StoredPool(BasePool):
    """A BasePool whose bases are also put into a store, and come back from it.

    What the store holds is listed once, and again at ``refresh``. A fault of the store costs reuse and nothing else: it
    is counted in ``faults`` and logged, and the text is computed. Neighbours are found among the texts in memory alone:
    the store lists keys, and a key does not tell token ids.

    Args:
        device: where bases are used.
    """

    def __init__(
        self,
        namespace: Namespace,
        fingerprint: ModelFingerprint,
        store: Store,
        device: torch.device,
        max_bytes: int = 2 << 30,
        max_entries: int = 65536,
    ) -> None:
        super().__init__(namespace, fingerprint, max_bytes, max_entries)
        self.store = store
        self.faults = 0
        self._device = device
        self._stored: dict[str, dict[CacheKey, None]] = {}
        self.refresh()

    def refresh(self) -> int:
        """List the store again, so that bases put by other processes are found; returns how many it holds."""
        try:
            listed = [entry.key for entry in self.store.entries(self.namespace, self.fingerprint)]
        except StoreError as error:
            self._fault("listing the store", error)
            return 0
        stored: dict[str, dict[CacheKey, None]] = {}
        for key in listed:
            stored.setdefault(key.content, {})[key] = None
        with self._lock:
            self._stored = stored
        return len(listed)

    def put(self, segment: Segment, recipe: Recipe, kv: SegmentKV) -> bool:
        """As BasePool.put; what was added goes into the store too."""
        added = super().put(segment, recipe, kv)
        if added:
            key = CacheKey.of(self.namespace, self.fingerprint, segment, recipe)
            try:
                self.store.put(key, Entry(segment, _on(kv, torch.device("cpu")), Attributes(_priority(recipe))))
                with self._lock:
                    self._stored.setdefault(key.content, {})[key] = None
            except StoreError as error:
                self._fault("keeping a base", error)
        return added

    def bases(self, segment: Segment) -> list[Base]:
        """As BasePool.bases, after fetching those of this content that only the store holds."""
        with self._lock:
            wanted = [key for key in self._stored.get(segment.digest, ()) if key not in self._entries]
        for key in wanted:
            self._fetch(key, segment)
        return super().bases(segment)

    def drop(self, which: Callable[[CacheKey], bool]) -> int:
        """Drop the bases here and the store's entries whose key ``which`` chooses, whichever process put them there.

        A call under way in another thread may put one back.

        Returns:
            how many there were, each key counted once.

        Raises:
            StoreError: the store could not list or delete; here they are gone.
        """
        here = self._drop(which)
        self.store.flush()  # what was put and is on its way to a lower tier must not arrive afterwards
        stored = {entry.key for entry in self.store.entries(self.namespace, self.fingerprint) if which(entry.key)}
        for key in stored:
            self.store.delete(key)
        with self._lock:
            for key in stored | here:
                self._stored.get(key.content, {}).pop(key, None)
        return len(stored | here)

    def _fetch(self, key: CacheKey, segment: Segment) -> None:
        try:
            handle = self.store.get(key)
            if handle is not None:
                with handle:
                    if handle.segment.token_ids == segment.token_ids:
                        super().put(segment, key.recipe, _on(handle.read(), self._device))
                        return
        except (StoreError, InvalidInput) as error:
            self._fault("fetching a base", error)
            if not isinstance(error, (CorruptEntry, InvalidInput)):
                return
        with self._lock:
            self._stored.get(segment.digest, {}).pop(key, None)

    def _find(self, key: CacheKey, segment: Segment | None = None) -> Base | None:
        """As BasePool, after fetching what only the store holds."""
        if segment is not None and key not in self._entries and key in self._stored.get(key.content, ()):
            self._fetch(key, segment)
        return super()._find(key, segment)

    def _fault(self, doing: str, error: KVCommError) -> None:
        with self._lock:
            self.faults += 1
        log.warning("%s failed, going on without: %s", doing, error)


def _on(kv: SegmentKV, device: torch.device) -> SegmentKV:
    return SegmentKV(kv.keys.to(device), kv.values.to(device))


def _priority(recipe: Recipe) -> Priority:
    """Fixed text of a template (``agent/#n``) is kept longest, what fills slots is history."""
    return Priority.SYSTEM if "/#" in recipe.context else Priority.HISTORY
