"""A pinned entry as the bytes that clients get: its file as it lies in the page cache, or encoded from another tier."""

from __future__ import annotations

from kvcomm.errors import InvalidInput
from kvcomm.store.base import Deadline, Handle
from kvcomm.store.codec import EntryWriter
from kvcomm.store.disk_handle import DiskHandle
from kvcomm.transfer.frame import Kind, pack
from kvcomm.transfer.wire import Wire, cut

SEND_BYTES = 8 << 20
MIN_LEAD_BYTES, MAX_LEAD_BYTES = 64 << 10, 1 << 20


class Value:
    """What a client reads from while it holds a lease.

    Attributes:
        nbytes: of the whole entry, in the format of stored entries.
        lead_bytes: how many bytes are sent when it is opened: those before its first layer, and a small entry whole.
    """

    def __init__(self, handle: Handle, now_s: float) -> None:
        self.handle = handle
        self._buffers: list[memoryview] = []
        if isinstance(handle, DiskHandle) and handle.lead_bytes:
            self.nbytes = handle.nbytes
            self.lead_bytes = _lead(handle.lead_bytes, self.nbytes)
            return
        writer = EntryWriter(handle.key, handle.entry(), "raw", now_s, handle.expires_s)
        parts = list(writer)
        self._buffers = [buffer for part in parts for buffer in part]
        self.nbytes = writer.nbytes
        self.lead_bytes = _lead(sum(len(b) for part in parts[:2] for b in part), self.nbytes)

    def send(self, wire: Wire, number: int, start: int, nbytes: int, deadline: Deadline) -> None:
        """Send bytes ``start`` to ``start + nbytes`` as frames of at most 8 MiB, the last one an answer.

        Raises:
            InvalidInput: the value has no such bytes.
            StoreError, DeadlineExceeded: reading or sending failed.
        """
        if nbytes < 1 or start + nbytes > self.nbytes:
            raise InvalidInput(f"bytes {start} to {start + nbytes} are not within {self.nbytes}; ask for fewer")
        end = start + nbytes
        while start < end:
            size = min(SEND_BYTES, end - start)
            kind = Kind.ANSWER if start + size == end else Kind.PART
            self.send_one(wire, pack(kind, number, payload_bytes=size), start, size, deadline)
            start += size

    def send_one(self, wire: Wire, head: bytes, start: int, nbytes: int, deadline: Deadline) -> None:
        """Send one frame: ``head``, then bytes of the value."""
        if self._buffers:
            wire.send_all([memoryview(head), *cut(self._buffers, start, nbytes)], deadline)
            return
        if not isinstance(self.handle, DiskHandle):
            raise InvalidInput("the value has neither buffers nor a file; open it again")
        with self.handle.file() as fd:
            wire.send_file(head, fd, start, nbytes, deadline)

    def release(self) -> None:
        """Unpin."""
        self.handle.release()
        self._buffers = []


def _lead(before_layers: int, nbytes: int) -> int:
    return min(max(before_layers, MIN_LEAD_BYTES), MAX_LEAD_BYTES, nbytes)
