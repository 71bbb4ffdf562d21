"""One entry's place in the pool, and the handle that pins it."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from typing import Protocol, TypeAlias

import torch

from kvcomm.errors import StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.arena import Extents
from kvcomm.store.base import Entry, Handle, Listing, check_layer
from kvcomm.types import SegmentKV

_pins = itertools.count()


class Slot:
    """An entry's record. ``pieces`` are (offset, bytes): one for all, or one for each layer's keys and values."""

    __slots__ = (
        "attributes", "charged", "copies", "created_s", "encoding", "expires_s", "freed", "key", "leases", "name",
        "nbytes", "pieces", "ready", "segment", "unpinned",
    )  # fmt: skip

    def __init__(self, key: CacheKey, entry: Entry, now_s: float) -> None:
        self.key, self.segment, self.attributes, self.encoding = key, entry.segment, entry.attributes, entry.encoding
        self.name = key.digest
        self.nbytes = entry.kv.nbytes
        self.created_s = now_s
        self.expires_s = entry.ends(now_s)
        self.pieces: list[tuple[int, int]] = []
        self.leases: dict[int, float] = {}
        self.unpinned: list[int] = []  # pins of handles that ended by themselves, noted by whichever thread saw it
        self.copies = 0
        self.ready = self.freed = self.charged = False

    @property
    def namespace(self) -> str:
        """Its namespace's name."""
        return self.key.namespace.name

    @property
    def priority(self) -> int:
        """Its eviction class."""
        return int(self.attributes.priority)

    @property
    def group(self) -> str:
        """Its group's label."""
        return self.attributes.group

    def pinned(self) -> bool:
        """Whether a copy runs or a lease holds; leases that ended are dropped."""
        while self.unpinned:
            self.leases.pop(self.unpinned.pop(), None)
        if self.leases:
            now = time.monotonic()
            self.leases = {pin: end for pin, end in self.leases.items() if end > now}
        return bool(self.copies or self.leases)

    def expired(self, now_s: float) -> bool:
        """Whether its time to live has passed."""
        return self.expires_s is not None and self.expires_s <= now_s

    def listing(self) -> Listing:
        """How it is listed."""
        return Listing(
            self.key, len(self.segment), self.nbytes, self.encoding, self.attributes, self.created_s, self.expires_s
        )


class Pool(Protocol):
    """What a handle asks of its store."""

    def begin_copy(self, slot: Slot) -> torch.Tensor: ...

    def end_copy(self, slot: Slot) -> None: ...

    def unpin(self, slot: Slot, pin: int) -> None: ...


class MemoryHandle(Handle):
    """Pins a slot until ``release``, the lease's end, or the handle's own end. Made under the store's lock."""

    def __init__(self, pool: Pool, slot: Slot, lease_end: float) -> None:
        self.pin = next(_pins)
        slot.leases[self.pin] = lease_end
        self._pool, self._slot = pool, slot
        self.key, self.segment, self.attributes = slot.key, slot.segment, slot.attributes
        self.encoding, self.nbytes, self.expires_s = slot.encoding, slot.nbytes, slot.expires_s
        self._released = False
        weakref.finalize(self, slot.unpinned.append, self.pin)

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        check_layer(self.key.fingerprint, len(self.segment), layer, (keys, values))
        pool = self._begin()
        try:
            parts = views(pool, self._slot)
            keys.copy_(parts[0][layer])
            values.copy_(parts[1][layer])
        finally:
            self._pool.end_copy(self._slot)

    def read_into(self, out: SegmentKV) -> None:
        out.check(self.key.fingerprint, len(self.segment))
        pool = self._begin()
        try:
            for destination, source in zip((out.keys, out.values), views(pool, self._slot), strict=True):
                if isinstance(source, torch.Tensor):
                    destination.copy_(source)
                else:
                    for layer, part in enumerate(source):
                        destination[layer].copy_(part)
        finally:
            self._pool.end_copy(self._slot)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._pool.unpin(self._slot, self.pin)

    def _begin(self) -> torch.Tensor:
        if self._released:
            raise StoreUnavailable(f"the handle of {self.key} was released; get it again")
        return self._pool.begin_copy(self._slot)


def allocate(extents: Extents, slot: Slot) -> bool:
    """Find the slot's place: in one piece, else a piece for each layer's keys and values. False if there is none."""
    whole = extents.alloc(slot.nbytes)
    if whole is not None:
        slot.pieces = [(whole, slot.nbytes)]
        return True
    model = slot.key.fingerprint
    size = math.prod((model.n_kv_heads, len(slot.segment), model.head_dim, model.torch_dtype.itemsize))
    found: list[tuple[int, int]] = []
    for _ in range(2 * model.n_layers):
        offset = extents.alloc(size)
        if offset is None:
            for place, nbytes in found:
                extents.free(place, nbytes)
            return False
        found.append((offset, size))
    slot.pieces = found
    return True


Layers: TypeAlias = torch.Tensor | list[torch.Tensor]


def views(pool: torch.Tensor, slot: Slot) -> tuple[Layers, Layers]:
    """Keys and values in the pool: [layers, kv heads, tokens, head dim] each, or a list over layers."""
    model = slot.key.fingerprint
    layer = (model.n_kv_heads, len(slot.segment), model.head_dim)
    if len(slot.pieces) == 1:
        offset, _ = slot.pieces[0]
        shape = (2, model.n_layers, *layer)
        both = pool[offset : offset + math.prod(shape) * model.torch_dtype.itemsize].view(model.torch_dtype).view(shape)
        return both[0], both[1]
    parts = [pool[offset : offset + size].view(model.torch_dtype).view(layer) for offset, size in slot.pieces]
    return parts[: model.n_layers], parts[model.n_layers :]


def copy_in(pool: torch.Tensor, slot: Slot, kv: SegmentKV) -> None:
    """Copy the entry's KV into its place."""
    for source, target in zip((kv.keys, kv.values), views(pool, slot), strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)
        else:
            for layer, part in enumerate(target):
                part.copy_(source[layer])
