"""Which bases a store holds, as one pool knows it: listed once, or followed as others put, delete and drop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from kvcomm.anchors.guard import Guard
from kvcomm.keys import CacheKey
from kvcomm.store.base import Listing


class Catalogue:
    """Keys by content, with the group that each was put in. A kvcomm.store.coordinator.Follower; threads may share it.

    Args:
        on_gone: told of keys that were deleted or dropped, which then must not be served from memory either.
        guard: told when the service was heard of.
        frozen: take in no keys after the first listing; what goes, goes.

    Attributes:
        losses: grows whenever keys go, before ``on_gone`` is called.
    """

    def __init__(self, on_gone: Callable[[Collection[CacheKey]], None], guard: Guard, frozen: bool = False) -> None:
        self._on_gone, self._guard, self._frozen = on_gone, guard, frozen
        self._held: dict[str, dict[CacheKey, str]] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self.losses = 0

    def wait(self, seconds: float) -> bool:
        """Wait for the first listing; whether there was one."""
        return self._ready.wait(seconds)

    def keys(self, content: str) -> list[CacheKey]:
        """Keys of a content digest, the first put first."""
        with self._lock:
            return list(self._held.get(content, ()))

    def __contains__(self, key: CacheKey) -> bool:
        with self._lock:
            return key in self._held.get(key.content, ())

    def hold(self, key: CacheKey, group: str = "") -> None:
        """Note a key that is there for sure: put from here, or found."""
        with self._lock:
            self._held.setdefault(key.content, {})[key] = group

    def lose(self, key: CacheKey) -> None:
        """Note that a key is not there: evicted, or unreadable. What memory holds of it stays."""
        with self._lock:
            self._take(key)

    def listed(self, listings: list[Listing]) -> None:
        """All that is held now."""
        now = {entry.key: entry.attributes.group for entry in listings}
        with self._lock:
            known = {key for keys in self._held.values() for key in keys}
            if self._frozen and self._ready.is_set():
                now = {key: group for key, group in now.items() if key in known}
            gone = known - set(now)
            self._held = {}
            for key, group in now.items():
                self._held.setdefault(key.content, {})[key] = group
            self.losses += bool(gone)
        if gone:
            self._on_gone(gone)
        self._ready.set()

    def added(self, key: CacheKey, group: str) -> None:
        """An entry was put."""
        if not self._frozen:
            self.hold(key, group)

    def removed(self, key: CacheKey) -> None:
        """An entry was deleted."""
        with self._lock:
            self._take(key)
            self.losses += 1
        self._on_gone([key])

    def dropped(self, group: str) -> None:
        """A group was dropped, or everything."""
        with self._lock:
            gone = [key for keys in self._held.values() for key, of in keys.items() if not group or of == group]
            for key in gone:
                self._take(key)
            self.losses += 1
        self._on_gone(gone)

    def alive(self) -> None:
        """The service was heard of."""
        self._guard.alive()

    def _take(self, key: CacheKey) -> None:
        keys = self._held.get(key.content)
        if keys is not None and keys.pop(key, None) is not None and not keys:
            del self._held[key.content]
