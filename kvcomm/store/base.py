"""The protocol that every tier follows, and its nouns.

A ``Store`` gives back exactly the bytes of an acknowledged ``put`` under the same key, or ``None``, or raises. A miss
is a value, a fault is an exception, corruption is never data. Entries are immutable: the first put wins and a second
says so. All methods are synchronous, safe to call from several threads, and give up at their deadline.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from kvcomm.errors import DeadlineExceeded, InvalidInput
from kvcomm.keys import CacheKey
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, Blobs
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

if TYPE_CHECKING:
    from kvcomm.store.coordinator import Coordinator

DEFAULT_LEASE_S = 30.0
MAX_LEASE_S = 3600.0
MAX_TOKENS = 2**22
MAX_GROUP_CHARS = 256


class Priority(IntEnum):
    """Eviction classes; a lower one goes first, whatever the policy says."""

    HISTORY = 0  # a session's turns, least recently used first
    SHARED = 1  # agent state shared under a lease: give it a ttl_s and renew with touch
    TOOL = 2  # tool definitions; the group is name and version
    SYSTEM = 3  # system text, shared by most calls


@dataclass(frozen=True, slots=True)
class Attributes:
    """How an entry is to be kept.

    Attributes:
        priority: eviction class.
        group: label of entries that are dropped together: a tool's name and version, or a session.
        ttl_s: seconds after which the entry is a miss unless ``touch`` renews it; None for no end.
    """

    priority: Priority = Priority.HISTORY
    group: str = ""
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, Priority):
            raise InvalidInput(f"priority {self.priority!r} is not a Priority; use Priority.HISTORY to Priority.SYSTEM")
        if len(self.group) > MAX_GROUP_CHARS:
            raise InvalidInput(f"group of {len(self.group)} characters exceeds {MAX_GROUP_CHARS}; use a digest instead")
        if self.ttl_s is not None and not (math.isfinite(self.ttl_s) and self.ttl_s > 0):
            raise InvalidInput(f"ttl_s {self.ttl_s} is not a positive number of seconds; use None for no end")


@dataclass(frozen=True, slots=True)
class Entry:
    """What is put: a segment, its base KV and how to keep it.

    Attributes:
        encoding: precision that the KV went through, ``raw`` for none. A store that keeps fewer bits says so here.
        expires_s: for an entry that is copied from another tier, the Unix time at which it ends there.
    """

    segment: Segment
    kv: SegmentKV
    attributes: Attributes = Attributes()
    encoding: str = "raw"
    expires_s: float | None = None

    def ends(self, now_s: float) -> float | None:
        """Unix time at which the entry ends if it is put now."""
        if self.expires_s is not None or self.attributes.ttl_s is None:
            return self.expires_s
        return now_s + self.attributes.ttl_s

    def check(self, key: CacheKey) -> None:
        """Raise InvalidInput unless tokens, shapes and dtype are those that ``key`` names."""
        if not 1 <= len(self.segment) <= MAX_TOKENS:
            raise InvalidInput(f"segment of {len(self.segment)} tokens is outside 1 to {MAX_TOKENS}; split it")
        if self.segment.digest != key.content:
            raise InvalidInput(
                f"token ids have digest {self.segment.digest[:16]} but the key names {key.content[:16]}; "
                "build the key with CacheKey.of from the same segment"
            )
        self.kv.check(key.fingerprint, len(self.segment))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a put did.

    Attributes:
        stored: True if this call stored the entry; False if the key was there already (the first put won).
        durable: whether the entry survives the end of this process and a loss of power.
        nbytes: bytes that the entry takes in the tier.
    """

    stored: bool
    durable: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """One held entry as a listing shows it; no payload was read."""

    key: CacheKey
    tokens: int
    nbytes: int
    encoding: str
    attributes: Attributes
    created_s: float
    expires_s: float | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since opening, and what is held now. ``counters``: hits, misses, puts, existed, evictions, corrupt, ..."""

    tier: str
    entries: int
    nbytes: int
    max_bytes: int
    max_entries: int
    counters: dict[str, int] = field(default_factory=dict)
    tiers: tuple[StoreStats, ...] = ()


class Deadline:
    """A point in time until which a call may wait."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidInput(f"deadline_s {seconds} is not a positive finite number of seconds; pass one")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, 0.0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    def error(self, what: str) -> DeadlineExceeded:
        """The error to raise when waiting for ``what`` took too long."""
        return DeadlineExceeded(f"{what} took longer than deadline_s={self.seconds}; retry, or pass a longer deadline")


class Handle(ABC):
    """A pinned entry. Eviction leaves it alone until ``release``, or until its lease ends. Every read is a copy.

    Attributes:
        key, segment, attributes, encoding: as put.
        nbytes: bytes that the entry takes in its tier.
        expires_s: Unix time at which the entry ends unless it is renewed, or None.
    """

    key: CacheKey
    segment: Segment
    attributes: Attributes
    encoding: str
    nbytes: int
    expires_s: float | None
    arrives = False
    """Whether its layers come over a connection, so that who uses the first need not wait for the last."""

    def entry(self) -> Entry:
        """The entry as it can be put into another tier; its KV is a copy."""
        return Entry(self.segment, self.read(), self.attributes, self.encoding, self.expires_s)

    @abstractmethod
    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer into ``keys`` and ``values`` [kv heads, tokens, head dim]; nothing else is read.

        Raises:
            InvalidInput: no such layer, or wrong shape or dtype.
            CorruptEntry: the bytes failed their check; the destination holds zeros.
            StoreUnavailable: the handle was released, or its lease ended and the entry is gone.
        """

    def read_into(self, out: SegmentKV) -> None:
        """Copy all layers into ``out``; errors as for ``layer_into``."""
        out.check(self.key.fingerprint, len(self.segment))
        for layer in range(self.key.fingerprint.n_layers):
            self.layer_into(layer, out.keys[layer], out.values[layer])

    def read_layers(self, rooms: Sequence[tuple[torch.Tensor, torch.Tensor]], deadline: Deadline) -> Iterator[int]:
        """Copy all layers, each into its (keys, values), and give the number of each when it is there.

        Raises:
            as ``layer_into``, DeadlineExceeded among them; what was given before stays as it is.
        """
        for layer, (keys, values) in enumerate(rooms):
            if not deadline.left():
                raise deadline.error(f"reading {self.nbytes} bytes")
            self.layer_into(layer, keys, values)
            yield layer

    def read(self) -> SegmentKV:
        """A fresh copy in host memory; errors as for ``layer_into``."""
        out = empty_kv(self.key.fingerprint, len(self.segment))
        self.read_into(out)
        return out

    @abstractmethod
    def release(self) -> None:
        """Unpin; may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Store(ABC):
    """One tier, or several that look like one. See the module's docstring for what every store promises."""

    name: str
    durable: bool  # whether every acknowledged put outlives the process and a loss of power
    blobs: Blobs
    coordinator: Coordinator | None = None  # what there is beyond entries where nodes meet in this store

    @abstractmethod
    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        """Keep ``entry`` under ``key``; when it returns, the entry is held as the receipt says.

        Raises:
            InvalidInput: the entry does not belong to the key.
            StoreUnavailable: closed, full of pinned entries, no space, failing, past the deadline; nothing was kept.
        """

    @abstractmethod
    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        """Pin and return the entry, or None.

        Raises:
            CorruptEntry: it was there and failed verification; it is set aside, the next call is a miss.
            StoreUnavailable: the tier could not answer.
        """

    def get_into(self, key: CacheKey, out: SegmentKV, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Segment | None:
        """Copy the entry into ``out`` [layers, kv heads, tokens, head dim], which must fit; its segment, or None."""
        handle = self.get(key, deadline_s=deadline_s)
        if handle is None:
            return None
        with handle:
            handle.read_into(out)
            return handle.segment

    @abstractmethod
    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        """Whether ``get`` would most likely hit; counts and renews nothing."""

    def contains_many(self, keys: Sequence[CacheKey], *, deadline_s: float = DEFAULT_DEADLINE_S) -> list[bool]:
        """``contains`` of each key, of any namespaces; a store that is far away is asked for many at once.

        Raises:
            StoreUnavailable: one of them could not be answered.
        """
        deadline = Deadline(deadline_s)
        return [self.contains(key, deadline_s=max(deadline.left(), 0.001)) for key in keys]

    @abstractmethod
    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        """Forget the entry, pinned or not; True if it was there. Open handles on disk may go on reading."""

    @abstractmethod
    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Forget everything of a namespace, named blobs too; the number of entries that were there."""

    @abstractmethod
    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Forget the entries put with ``Attributes(group=group)``; how many there were."""

    @abstractmethod
    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        """Count a use. False if the entry is not there.

        With ``ttl_s``, an entry that was put with a time to live goes on for at least that long from now.
        """

    @abstractmethod
    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        """What is held, without reading payloads. Entries put or evicted meanwhile may or may not appear."""

    def catalogue(self, namespace: Namespace, fingerprint: ModelFingerprint) -> dict[str, list[Listing]]:
        """What a new process can reuse: for each content digest, how it is held (``listing.key.recipe``)."""
        found: dict[str, list[Listing]] = {}
        for listing in self.entries(namespace, fingerprint):
            found.setdefault(listing.key.content, []).append(listing)
        return found

    @abstractmethod
    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        """Counts and sizes; with a namespace, its own only."""

    @abstractmethod
    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Wait until everything acknowledged is as durable as this store can make it."""

    @abstractmethod
    def close(self) -> None:
        """Flush and let go of everything; later calls raise StoreUnavailable. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def empty_kv(fingerprint: ModelFingerprint, tokens: int) -> SegmentKV:
    """Uninitialised KV [layers, kv heads, tokens, head dim] of the fingerprint's dtype in host memory."""
    shape = (fingerprint.n_layers, fingerprint.n_kv_heads, tokens, fingerprint.head_dim)
    dtype = fingerprint.torch_dtype
    return SegmentKV(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))


def check_lease(lease_s: float) -> float:
    """``lease_s`` itself, if it is one."""
    if not (math.isfinite(lease_s) and 0 < lease_s <= MAX_LEASE_S):
        raise InvalidInput(f"lease_s {lease_s} is outside 0 to {MAX_LEASE_S}; get the entry again instead")
    return lease_s


def check_layer(fingerprint: ModelFingerprint, tokens: int, layer: int, parts: Sequence[torch.Tensor]) -> None:
    """Raise InvalidInput unless ``layer`` exists and every part is [kv heads, tokens, head dim] of the right dtype."""
    if not 0 <= layer < fingerprint.n_layers:
        raise InvalidInput(f"layer {layer} is outside 0 to {fingerprint.n_layers - 1}")
    want = (fingerprint.n_kv_heads, tokens, fingerprint.head_dim)
    for part in parts:
        if tuple(part.shape) != want or part.dtype != fingerprint.torch_dtype:
            raise InvalidInput(f"destination {tuple(part.shape)} {part.dtype} is not {want} {fingerprint.torch_dtype}")
