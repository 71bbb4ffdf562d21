"""Which held texts are nearly a given one: an index per namespace and model, made from the entries that are stored.

Nothing of it is loaded from outside: sketches are taken here, of token ids whose digest the key names. Each namespace
has its own; what one puts in, evicts or asks changes nothing for another, in results or in limits.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvcomm.anchors.index import Neighbour, NeighbourIndex
from kvcomm.errors import CorruptEntry, InvalidInput, StoreError
from kvcomm.keys import CacheKey
from kvcomm.store.base import Store
from kvcomm.types import ModelFingerprint, Namespace, Segment

log = logging.getLogger(__name__)
MAX_TEXTS = 16_000
MAX_TOKENS = 16 << 20
MAX_COUNT = 64
MIN_TOKENS = 16


@dataclass(frozen=True)
class Near:
    """A held text, the cosine of its sketch with the one asked for, and the keys of its bases in that context."""

    segment: Segment
    cosine: float
    keys: tuple[CacheKey, ...]


class _Space:
    """The texts of one namespace and model, the least recently added to be dropped first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: OrderedDict[str, tuple[Segment, dict[CacheKey, None]]] = OrderedDict()
        self.tokens = 0
        self.all = NeighbourIndex()
        self.contexts: dict[str, NeighbourIndex] = {}

    def add(self, segment: Segment, key: CacheKey) -> None:
        if segment.digest not in self.held:
            self.held[segment.digest] = segment, {}
            self.tokens += len(segment)
            self.all.add(segment)
        self.held[segment.digest][1][key] = None
        self.contexts.setdefault(key.recipe.context, NeighbourIndex()).add(segment)

    def remove(self, key: CacheKey) -> bool:
        segment, keys = self.held.get(key.content, (None, {}))
        if segment is None or key not in keys:
            return False
        del keys[key]
        if all(other.recipe.context != key.recipe.context for other in keys):
            self._leave(key.recipe.context, segment)
        if not keys:
            self.all.remove(segment)
            del self.held[key.content]
            self.tokens -= len(segment)
        return True

    def shrink(self, texts: int, tokens: int) -> None:
        while self.held and (len(self.held) > texts or self.tokens > tokens):
            for key in list(next(iter(self.held.values()))[1]):
                self.remove(key)

    def _leave(self, context: str, segment: Segment) -> None:
        index = self.contexts[context]
        index.remove(segment)
        if not len(index):
            del self.contexts[context]


class Neighbours:
    """The service's neighbour index. Threads may use one object at once.

    Args:
        max_texts, max_tokens: what a namespace may have in it for one model; beyond, the oldest texts go, which can
            then be found by their exact key only. About 36 bytes a token and 4 KiB a text.

    Raises:
        InvalidInput: a limit is below 1.
    """

    def __init__(self, max_texts: int = MAX_TEXTS, max_tokens: int = MAX_TOKENS) -> None:
        if max_texts < 1 or max_tokens < 1:
            raise InvalidInput(f"max_texts {max_texts} and max_tokens {max_tokens} must be at least 1; raise them")
        self._max_texts, self._max_tokens = max_texts, max_tokens
        self._lock = threading.Lock()
        self._spaces: dict[tuple[str, str], _Space] = {}
        self._built: dict[str, threading.Thread] = {}

    def add(self, key: CacheKey, segment: Segment) -> bool:
        """Hold a stored entry's text; False where it is shorter than 16 tokens, and so not worth finding.

        Raises:
            InvalidInput: ``segment`` is not the one that ``key`` names.
        """
        if segment.digest != key.content:
            raise InvalidInput(
                f"token ids have digest {segment.digest[:16]}, the key names {key.content[:16]}; not held"
            )
        if not MIN_TOKENS <= len(segment) <= self._max_tokens:
            return False
        with self._lock:
            space = self._spaces.setdefault((key.namespace.name, key.fingerprint.digest), _Space())
        with space.lock:
            space.add(segment, key)
            space.shrink(self._max_texts, self._max_tokens)
        return True

    def remove(self, key: CacheKey) -> bool:
        """Drop an entry that is not stored any more; False where it is not held."""
        space = self._space(key.namespace, key.fingerprint)
        if space is None:
            return False
        with space.lock:
            return space.remove(key)

    def delete_namespace(self, namespace: Namespace) -> None:
        """Drop all of a namespace."""
        with self._lock:
            for owner in [owner for owner in self._spaces if owner[0] == namespace.name]:
                del self._spaces[owner]

    def nearest(
        self,
        namespace: Namespace,
        fingerprint: ModelFingerprint,
        segment: Segment,
        *,
        context: str | None = None,
        count: int = 8,
        least: float = 0.5,
    ) -> list[Near]:
        """Up to ``count`` held texts whose cosine is ``least`` or more, the nearest first.

        Args:
            namespace: the token's.
            context: only texts with a base captured there (``agent/slot``), and only those bases; None for all.

        Raises:
            InvalidInput: ``count`` is outside 1 to 64.
        """
        if not 1 <= count <= MAX_COUNT:
            raise InvalidInput(f"count {count} is outside 1 to {MAX_COUNT}; ask for fewer neighbours")
        space = self._space(namespace, fingerprint)
        if space is None:
            return []
        with space.lock:
            index = space.all if context is None else space.contexts.get(context)
            found = [] if index is None else index.nearest(segment, count, least)
            return [Near(n.segment, n.cosine, self._keys(space, n, context)) for n in found]

    def ready(self, store: Store, namespace: Namespace, wait_s: float = 1.0) -> bool:
        """Have a namespace's entries from before this start read in, by a thread, the first time that one asks.

        Returns:
            whether they all are; waits at most ``wait_s`` for it.
        """
        with self._lock:
            thread = self._built.get(namespace.name)
            if thread is None:
                thread = threading.Thread(target=self._build, args=(store, namespace), name="neighbours", daemon=True)
                self._built[namespace.name] = thread
                thread.start()
        thread.join(wait_s)
        return not thread.is_alive()

    def _build(self, store: Store, namespace: Namespace) -> None:
        try:
            self.rebuild(store, [namespace])
        except StoreError as error:
            log.warning("texts of namespace %s could not be listed: %s", namespace, error)
            with self._lock:
                self._built.pop(namespace.name, None)

    def rebuild(self, store: Store, namespaces: Iterable[Namespace] | None = None) -> int:
        """Add all entries of ``store``, reading their token ids and no KV; how many. What is corrupt is left out.

        Raises:
            StoreError: the store cannot list.
        """
        spaces: list[Namespace | None] = [None] if namespaces is None else list(namespaces)
        listed = [entry for space in spaces for entry in store.entries(space)]
        added = 0
        for listing in sorted(listed, key=lambda entry: (entry.created_s, entry.key.digest)):
            try:
                handle = store.get(listing.key)
            except (CorruptEntry, StoreError):
                continue
            if handle is not None:
                with handle:
                    added += self.add(listing.key, handle.segment)
        return added

    def texts(self, namespace: Namespace, fingerprint: ModelFingerprint) -> int:
        """Number of texts held."""
        space = self._space(namespace, fingerprint)
        return 0 if space is None else len(space.held)

    def _space(self, namespace: Namespace, fingerprint: ModelFingerprint) -> _Space | None:
        with self._lock:
            return self._spaces.get((namespace.name, fingerprint.digest))

    @staticmethod
    def _keys(space: _Space, found: Neighbour, context: str | None) -> tuple[CacheKey, ...]:
        keys = space.held[found.segment.digest][1]
        return tuple(key for key in keys if context is None or key.recipe.context == context)
