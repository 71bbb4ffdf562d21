"""Named blobs beside the entries: learned statistics, replaced whole, never half.

A blob belongs to a namespace and a fingerprint. Offsets' statistics add, so ``update`` merges under a lock that holds
among all threads and processes that use the store. What the bytes mean is the caller's.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeAlias

from kvcomm.errors import InvalidInput
from kvcomm.types import ModelFingerprint, Namespace

Owner: TypeAlias = tuple[Namespace, ModelFingerprint]
DEFAULT_DEADLINE_S = 10.0
MAX_BLOB_BYTES = 2**30
MAX_BLOBS = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Blobs(ABC):
    """Named byte strings of a (namespace, fingerprint). Reads raise CorruptEntry, all calls StoreUnavailable."""

    @abstractmethod
    def read(self, owner: Owner, name: str) -> bytes | None:
        """The bytes last written, or None."""

    @abstractmethod
    def update(
        self, owner: Owner, name: str, merge: Callable[[bytes | None], bytes], *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        """Replace the blob by ``merge(old)``, alone among threads and processes; a corrupt old one counts as None."""

    def write(self, owner: Owner, name: str, data: bytes, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Replace the blob; when it returns the new one is durable, until then the old one is there whole."""
        self.update(owner, name, lambda _: data, deadline_s=deadline_s)

    @abstractmethod
    def delete(self, owner: Owner, name: str) -> bool:
        """Forget it; True if it was there."""

    @abstractmethod
    def delete_namespace(self, namespace: Namespace) -> None:
        """Forget all blobs of a namespace."""

    @abstractmethod
    def names(self, owner: Owner) -> Iterator[str]:
        """Names of the blobs held."""


class MemoryBlobs(Blobs):
    """Blobs in a dictionary, at most ``max_bytes`` together."""

    def __init__(self, max_bytes: int = MAX_BLOB_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: dict[tuple[str, str, str], bytes] = {}
        self._lock = threading.Lock()

    def read(self, owner: Owner, name: str) -> bytes | None:
        return self._held.get(self._key(owner, name))

    def update(
        self, owner: Owner, name: str, merge: Callable[[bytes | None], bytes], *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        key = self._key(owner, name)
        with self._lock:
            data = bytes(merge(self._held.get(key)))
            others = sum(len(b) for k, b in self._held.items() if k != key)
            if others + len(data) > self._max_bytes:
                raise InvalidInput(f"blobs of {others + len(data)} bytes exceed {self._max_bytes}; raise max_bytes")
            if key not in self._held and sum(k[:2] == key[:2] for k in self._held) >= MAX_BLOBS:
                raise InvalidInput(f"blob {name} would be one more than {MAX_BLOBS}; delete one")
            self._held[key] = data

    def delete(self, owner: Owner, name: str) -> bool:
        with self._lock:
            return self._held.pop(self._key(owner, name), None) is not None

    def delete_namespace(self, namespace: Namespace) -> None:
        """Forget all blobs of a namespace."""
        with self._lock:
            for key in [k for k in self._held if k[0] == namespace.name]:
                del self._held[key]

    def names(self, owner: Owner) -> Iterator[str]:
        namespace, fingerprint = owner
        held = list(self._held)
        return (name for n, f, name in held if (n, f) == (namespace.name, fingerprint.digest))

    @staticmethod
    def _key(owner: Owner, name: str) -> tuple[str, str, str]:
        return owner[0].name, owner[1].digest, check_name(name)


def check_name(name: str) -> str:
    """``name`` itself, if it may name a blob."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"blob name {name[:80]!r} is not 1 to 64 of [a-z0-9._-]; choose such a name")
    return name
