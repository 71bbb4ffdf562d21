"""A pinned value: a private copy in this process, so that neither eviction nor a dying node can reach it."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from kvcomm.errors import StoreUnavailable
from kvcomm.store.base import Handle
from kvcomm.store.codec import EntryReader
from kvcomm.types import Segment, SegmentKV


class MooncakeHandle(Handle):
    """Made by ``MooncakeStore.get``; lets go of its copy at ``release``, or when the lease has ended."""

    def __init__(self, reader: EntryReader, segment: Segment, expires_s: float | None, lease_s: float) -> None:
        head = reader.head
        self.key, self.segment, self.attributes, self.encoding = head.key, segment, head.attributes, head.encoding
        self.nbytes, self.expires_s = reader.nbytes, expires_s
        self._reader: EntryReader | None = reader
        self._end = time.monotonic() + lease_s
        self._using = threading.Lock()

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        with self._using:
            self._open().layer_into(layer, keys, values)

    def read_into(self, out: SegmentKV) -> None:
        out.check(self.key.fingerprint, len(self.segment))
        with self._using:
            self._open().read_into(out)

    def release(self) -> None:
        with self._using:
            self._reader = None

    def lapse(self) -> bool:
        """Let go if the lease has ended and no read runs; whether it holds nothing now."""
        if time.monotonic() >= self._end and self._using.acquire(blocking=False):
            try:
                self._reader = None
            finally:
                self._using.release()
        return self._reader is None

    def _open(self) -> EntryReader:
        if self._reader is None or time.monotonic() >= self._end:
            self._reader = None
            raise StoreUnavailable(f"the handle of {self.key} was released or its lease ended; get it again")
        return self._reader


class Lent:
    """The handles that are out, at most ``limit``, so that copies do not pile up."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._handles: weakref.WeakSet[MooncakeHandle] = weakref.WeakSet()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Let lapsed ones go. Raises StoreUnavailable if as many are out as may be."""
        with self._lock:
            self._handles = weakref.WeakSet(handle for handle in self._handles if not handle.lapse())
            if len(self._handles) >= self._limit:
                raise StoreUnavailable(
                    f"{len(self._handles)} handles are out, the limit is {self._limit}; release some"
                )

    def add(self, handle: MooncakeHandle) -> None:
        """Count a new one."""
        with self._lock:
            self._handles.add(handle)

    def close(self) -> None:
        """Release all."""
        with self._lock:
            for handle in self._handles:
                handle.release()
