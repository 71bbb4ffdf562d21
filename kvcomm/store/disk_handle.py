"""A pinned entry on disk: an open file under a shared lock, read a layer at a time, until its lease ends."""

from __future__ import annotations

import heapq
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcomm.errors import CorruptEntry, StoreUnavailable
from kvcomm.store.base import Handle
from kvcomm.store.codec import EntryReader
from kvcomm.store.files import Files, trouble
from kvcomm.types import Segment, SegmentKV


class FileSource:
    """The bytes of an open file; see ``codec.Source``."""

    def __init__(self, files: Files, fd: int, size: int) -> None:
        self._files, self._fd, self.size = files, fd, size

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from ``offset``."""
        wanted = sum(map(len, buffers))
        with trouble("reading an entry"):
            done = self._files.readv(self._fd, buffers, offset)
        if done != wanted:
            raise CorruptEntry(f"the file ends at byte {offset + done}, {offset + wanted} were asked for; it was cut")


class DiskHandle(Handle):
    """Made by ``DiskStore.get``; ``on_corrupt`` is told once when a layer fails its check."""

    def __init__(
        self, files: Files, fd: int, reader: EntryReader, segment: Segment, on_corrupt: Callable[[CorruptEntry], None]
    ) -> None:
        head = reader.head
        self.key, self.segment, self.attributes, self.encoding = head.key, segment, head.attributes, head.encoding
        self.nbytes, self.expires_s = reader.nbytes, head.expires_s
        self._reader = reader
        self._on_corrupt = on_corrupt
        self._using = threading.Lock()
        self._fd = fd
        self._close = weakref.finalize(self, files.close, fd)

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        with self._reading():
            self._reader.layer_into(layer, keys, values)

    def read_into(self, out: SegmentKV) -> None:
        out.check(self.key.fingerprint, len(self.segment))
        with self._reading():
            self._reader.read_into(out)

    @property
    def lead_bytes(self) -> int:
        """Bytes of the file before its first layer; 0 where what lies in it is sealed and of use to nobody else."""
        return 0 if self._reader.sealed else self._reader.lead_bytes

    @contextmanager
    def file(self) -> Iterator[int]:
        """The open file's descriptor, for those who send it on as it is; it stays open inside."""
        with self._reading():
            yield self._fd

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._using:
            if not self._close.alive:
                raise StoreUnavailable(f"the handle of {self.key} was released or its lease ended; get it again")
            try:
                yield
            except CorruptEntry as error:
                self._on_corrupt(error)
                raise

    def release(self) -> None:
        with self._using:
            self._close()

    def lapse(self) -> bool:
        """End the lease, unless a read runs. Whether it ended."""
        if not self._using.acquire(blocking=False):
            return False
        try:
            self._close()
            return True
        finally:
            self._using.release()

    @property
    def open(self) -> bool:
        """Whether it still holds its file."""
        return self._close.alive


class Leases:
    """The handles that are out, at most ``limit``; each is closed when its lease ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[float, int, weakref.ref[DiskHandle]]] = []
        self._number = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Close what lapsed. Raises StoreUnavailable if as many handles are out as may be."""
        with self._lock:
            self._lapse()
            if len(self._heap) < self._limit:
                return
            self._heap = [item for item in self._heap if (handle := item[2]()) is not None and handle.open]
            heapq.heapify(self._heap)
            if len(self._heap) >= self._limit:
                raise StoreUnavailable(f"{len(self._heap)} handles are out, the limit is {self._limit}; release some")

    def add(self, handle: DiskHandle, lease_s: float) -> None:
        """Watch over a new handle."""
        with self._lock:
            self._number += 1
            heapq.heappush(self._heap, (time.monotonic() + lease_s, self._number, weakref.ref(handle)))

    def close(self) -> None:
        """End all leases."""
        with self._lock:
            for _, _, ref in self._heap:
                handle = ref()
                if handle is not None:
                    handle.release()
            self._heap.clear()

    def _lapse(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            _, number, ref = heapq.heappop(self._heap)
            handle = ref()
            if handle is not None and handle.open and not handle.lapse():
                heapq.heappush(self._heap, (now + 1.0, number, ref))


def pin(fd: int, status: os.stat_result, lease_s: float) -> None:
    """Write the lease's end into an open, locked file's access time, for evictors in other processes.

    Twice the lease is written, and nothing if enough is written already, so that a hot entry costs one write a lease.
    """
    end = time.time() + lease_s
    if status.st_atime < end:
        os.utime(fd, ns=(int((end + lease_s) * 1e9), status.st_mtime_ns))
