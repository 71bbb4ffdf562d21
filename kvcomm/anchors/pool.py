"""The pool: bases found by content, bounded in bytes and count, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvcomm.anchors.arriving import ArrivingKV
from kvcomm.anchors.index import Neighbour, NeighbourIndex
from kvcomm.errors import InvalidInput, KVCommError
from kvcomm.keys import CacheKey, Recipe
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV, digest_fields

MIN_INDEXED = 16
"""Shorter texts, in tokens, are cheaper to compute than to find a neighbour of."""


@dataclass(frozen=True, eq=False)
class Base:
    """A segment's KV as it was computed somewhere, with how that was."""

    segment: Segment
    recipe: Recipe
    kv: SegmentKV


@dataclass(frozen=True, eq=False)
class Claim:
    """A text that this pool's user computes while others wait for it; ``end`` it, whether or not it was put."""

    end: Callable[[], None]


class BasePool:
    """Bases of one namespace and fingerprint, by content and by recipe.

    A pool may read through to a parent: look-ups fall back to it, additions stay in the child. Several users of one
    parent that must not see each other's additions each take a child.

    Threads may use one pool at once: each method is one step to the others. A lock is held for look-ups in memory only,
    a child's before its parent's; the KV of a base never changes, so that whoever holds one needs no lock.
    """

    def __init__(
        self,
        namespace: Namespace,
        fingerprint: ModelFingerprint,
        max_bytes: int = 2 << 30,
        max_entries: int = 65536,
        parent: BasePool | None = None,
    ) -> None:
        if max_bytes < 0 or max_entries < 0:
            raise InvalidInput(f"pool limits are {max_bytes} bytes and {max_entries} entries; give 0 or more")
        if parent is not None and not (parent.namespace == namespace and parent.fingerprint == fingerprint):
            raise InvalidInput("a child pool has its parent's namespace and fingerprint")
        self.namespace: Namespace = namespace
        self.fingerprint: ModelFingerprint = fingerprint
        self.max_bytes, self.max_entries = max_bytes, max_entries
        self.parent = parent
        self._lock = threading.RLock()
        self.nbytes = 0
        self.evicted = 0
        self._changes = 0
        self._entries: OrderedDict[CacheKey, Base] = OrderedDict()
        self._arriving: dict[CacheKey, Base] = {}
        self._by_content: dict[str, dict[Recipe, CacheKey]] = {}
        self._index: NeighbourIndex | None = None  # made when neighbours are first asked for

    def put(self, segment: Segment, recipe: Recipe, kv: SegmentKV) -> bool:
        """Add a base unless its key is held already (the first put wins); evict old ones to make room.

        Returns:
            whether it was added; a base larger than the whole pool is not.

        Raises:
            InvalidInput: the KV does not have the shape and dtype of the pool's fingerprint, or holds NaN or infinity.
        """
        kv.check(self.fingerprint, len(segment))
        if not kv.finite:
            raise InvalidInput(f"KV of a text of {len(segment)} tokens holds NaN or infinity; it is not kept")
        key = CacheKey.of(self.namespace, self.fingerprint, segment, recipe)
        if len(segment) == 0 or kv.nbytes > self.max_bytes or self.max_entries == 0:
            return False
        with self._lock:
            if self._find(key) is not None:
                return False
            while self._entries and (
                self.nbytes + kv.nbytes > self.max_bytes or len(self._entries) + 1 > self.max_entries
            ):
                self._remove(next(iter(self._entries)))
                self.evicted += 1
            self._entries[key] = Base(segment, recipe, kv)
            self._by_content.setdefault(segment.digest, {})[recipe] = key
            if self._index is not None and len(segment) >= MIN_INDEXED:
                self._index.add(segment)
            self.nbytes += kv.nbytes
            self._changes += 1
        return True

    def expect(self, segment: Segment, recipe: Recipe, kv: ArrivingKV) -> bool:
        """Add a base whose KV is on its way. It is found at once, and counts and stays when all of it is there.

        Returns:
            whether it was added: not where its key is held or on its way already.

        Raises:
            InvalidInput: the KV does not have the shape and dtype of the pool's fingerprint.
        """
        kv.check(self.fingerprint, len(segment))
        key = CacheKey.of(self.namespace, self.fingerprint, segment, recipe)
        base = Base(segment, recipe, kv)
        with self._lock:
            if self._find(key) is not None:
                return False
            self._arriving[key] = base
            self._by_content.setdefault(segment.digest, {})[recipe] = key  # its rank is that of now
        kv.at_end(lambda error: self._arrived(key, base, error))
        return True

    def _arrived(self, key: CacheKey, base: Base, error: KVCommError | None) -> None:
        """All of a base is there, or lost. One that was dropped meanwhile is not kept."""
        with self._lock:
            if self._arriving.get(key) is not base:
                return
            del self._arriving[key]
            kept = False
            if error is None and isinstance(base.kv, ArrivingKV):
                with suppress(InvalidInput):  # numbers so large that their sum is infinite
                    kept = BasePool.put(self, base.segment, base.recipe, base.kv.filled)
            if not kept:
                self._unlist(base)

    def _no_longer(self, key: CacheKey) -> None:
        """Expect a base no more; who uses it already goes on. The lock is held."""
        base = self._arriving.pop(key, None)
        if base is not None:
            self._unlist(base)

    def look_up(self, segments: Sequence[Segment]) -> None:
        """Before a prompt of these texts is planned: learn at once which of them are still held; here that is known."""

    def get(self, segment: Segment, recipe: Recipe) -> Base | None:
        """The base of exactly this content and recipe, or None. Token ids are compared, not digests alone."""
        return self._find(CacheKey.of(self.namespace, self.fingerprint, segment, recipe), segment)

    def bases(self, segment: Segment) -> list[Base]:
        """All bases of this content, the first put first; those of the parent before the child's."""
        found = self.parent.bases(segment) if self.parent is not None else []
        with self._lock:
            for key in list(self._by_content.get(segment.digest, {}).values()):
                base = self._arriving.get(key) or self._entries[key]
                if base.segment.token_ids == segment.token_ids:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                    found.append(base)
        return found

    def neighbours(self, segment: Segment, count: int, least: float) -> list[Neighbour]:
        """Up to ``count`` texts of which a base is held, here or in the parent, that look nearly like this one.

        The nearest first; ``least`` is the smallest cosine (kvcomm.anchors.index). Texts of fewer than MIN_INDEXED
        tokens neither have neighbours nor are any.
        """
        if len(segment) < MIN_INDEXED:
            return []
        theirs = self.parent.neighbours(segment, count, least) if self.parent is not None else []
        with self._lock:
            index = self._indexed()
            found = index.nearest(segment, count, least)
            found += [n for n in theirs if n.segment not in index]
        return sorted(found, key=lambda neighbour: -neighbour.cosine)[:count]

    def _indexed(self) -> NeighbourIndex:
        """The index over everything held, made on the first look-up: those who never look pay nothing for it."""
        if self._index is None:
            self._index = NeighbourIndex()
            for segment in {base.segment.digest: base.segment for base in self._entries.values()}.values():
                if len(segment) >= MIN_INDEXED:
                    self._index.add(segment)
        return self._index

    def flush(self) -> None:
        """Wait until what was put is where it belongs; here it is at once."""

    def close(self) -> None:
        """Let go of what the pool follows: nothing."""

    def claim(self, wanted: Sequence[tuple[Segment, Recipe]]) -> Claim | None:
        """Have others wait while the last of some texts is computed, or wait for them; None: nobody is there."""
        return None

    def forget(self, segment: Segment) -> int:
        """Drop every base of this content here; returns how many."""
        return self.drop(lambda key: key.content == segment.digest)

    def drop(self, which: Callable[[CacheKey], bool]) -> int:
        """Drop the bases held here whose key ``which`` chooses; returns how many."""
        return len(self._drop(which))

    def _drop(self, which: Callable[[CacheKey], bool]) -> set[CacheKey]:
        with self._lock:
            keys = {key for key in self._entries if which(key)}
            for key in keys:
                self._remove(key)
            for key in [key for key in self._arriving if which(key)]:
                self._no_longer(key)
                keys.add(key)
        return keys

    @property
    def version(self) -> int:
        """Grows whenever a base is added or dropped, here or in a parent."""
        return self._changes + (self.parent.version if self.parent is not None else 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Base]:
        with self._lock:
            return iter(list(self._entries.values()))

    def digest(self) -> str:
        """SHA-256 hex digest over the keys held here, in any order of insertion."""
        with self._lock:
            keys = list(self._entries)
        return digest_fields(*sorted(key.digest.encode() for key in keys))

    def _find(self, key: CacheKey, segment: Segment | None = None) -> Base | None:
        with self._lock:
            base = self._entries.get(key) or self._arriving.get(key)
            if base is not None:
                if key in self._entries:
                    self._entries.move_to_end(key)
                return base if segment is None or base.segment.token_ids == segment.token_ids else None
        return self.parent._find(key, segment) if self.parent is not None else None

    def _remove(self, key: CacheKey) -> None:
        """Drop one; the lock is held."""
        base = self._entries.pop(key, None)
        if base is None:
            return
        self._changes += 1
        self.nbytes -= base.kv.nbytes
        self._unlist(base)

    def _unlist(self, base: Base) -> None:
        """Forget where a base was found by its content; the lock is held."""
        recipes = self._by_content[base.segment.digest]
        del recipes[base.recipe]
        if not recipes:
            del self._by_content[base.segment.digest]
            if self._index is not None:
                self._index.remove(base.segment)
