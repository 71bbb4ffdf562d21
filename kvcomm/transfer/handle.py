"""A pinned entry of a service: read over a connection of its own, a layer while the next one is on its way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcomm.errors import CorruptEntry, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.base import Deadline, Handle
from kvcomm.store.codec import EntryReader
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.names import MAX_NBYTES, key_text
from kvcomm.types import SegmentKV

_DRAIN_BYTES = 4 << 20
OnCorrupt = Callable[[CacheKey], None]


class RemoteSource:
    """The bytes of a pinned entry; see ``codec.Source``. What was asked for in advance comes without another wait."""

    def __init__(self, connection: Connection, lease: int, size: int, lead: bytearray, deadline: Deadline) -> None:
        self.connection, self.lease, self.size = connection, lease, size
        self.deadline = deadline
        self._lead = memoryview(lead)
        self._coming: deque[tuple[int, int, int]] = deque()  # request, start, end
        self._in_frame = 0

    def ask(self, start: int, end: int) -> None:
        """Ask for bytes ``start`` to ``end`` in advance, save those that are here or on their way."""
        start = max(start, self._coming[-1][2] if self._coming else len(self._lead))
        if start < end:
            header = {"call": "read", "lease": self.lease, "start": start, "nbytes": end - start}
            self._coming.append((self.connection.send(header, self.deadline), start, end))

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from ``offset``, each from where its bytes are."""
        if offset + sum(map(len, buffers)) > self.size:
            raise CorruptEntry(f"the entry ends at byte {self.size}, more was asked for; it is not used")
        for buffer in buffers:
            here = max(0, min(len(buffer), len(self._lead) - offset))
            if here:
                buffer[:here] = self._lead[offset : offset + here]
            if here < len(buffer):
                self._receive(buffer[here:], offset + here)
            offset += len(buffer)

    def drain(self) -> None:
        """Read past what was asked for and not used, if it is little; else give the connection up."""
        if sum(end - start for _, start, end in self._coming) > _DRAIN_BYTES:
            self.connection.broken = True
        while self._coming and not self.connection.broken:
            _, start, end = self._coming[0]
            self._receive(memoryview(bytearray(min(1 << 20, end - start))), start)

    def _receive(self, buffer: memoryview, offset: int) -> None:
        if not self._coming or self._coming[0][1] != offset or self._coming[0][2] < offset + len(buffer):
            self.drain()
            if self.connection.broken:
                raise StoreUnavailable("the connection was given up; get the entry again")
            header = {"call": "read", "lease": self.lease, "start": offset, "nbytes": len(buffer)}
            self._coming.append((self.connection.send(header, self.deadline), offset, offset + len(buffer)))
        number, start, end = self._coming.popleft()
        at = 0
        try:
            with self.connection.breaking():
                while at < len(buffer):
                    if not self._in_frame:
                        self._next_frame(number, end - start - at)
                    size = min(self._in_frame, len(buffer) - at)
                    self.connection.wire.fill([buffer[at : at + size]], self.deadline)
                    at += size
                    self._in_frame -= size
        finally:
            if start + at < end:
                self._coming.appendleft((number, start + at, end))

    def _next_frame(self, number: int, left: int) -> None:
        try:
            preamble, _ = self.connection.next(number, self.deadline)
        except KVCommError:
            self.connection.broken = True  # whatever else was asked for would come in another order
            raise
        if not 0 < preamble.payload_bytes <= left or (preamble.kind is Kind.ANSWER) != (preamble.payload_bytes == left):
            raise ProtocolError(f"{preamble.payload_bytes} bytes came where {left} are missing; the connection is over")
        self._in_frame = preamble.payload_bytes


class RemoteHandle(Handle):
    """Made by ``RemoteStore.get``. It has a connection for itself until ``release``.

    Args:
        deadline_s: for each read.
        on_corrupt: told when bytes failed their check, so that the service looks at its own.
    """

    arrives = True

    def __init__(
        self, client: Client, connection: Connection, source: RemoteSource, key: CacheKey, expires_s: float | None,
        deadline_s: float, on_corrupt: OnCorrupt,
    ) -> None:  # fmt: skip
        self._reader = EntryReader(source, key.namespace.name, key)
        head = self._reader.head
        self.key, self.segment, self.attributes = head.key, self._reader.segment(), head.attributes
        self.encoding, self.nbytes, self.expires_s = head.encoding, self._reader.nbytes, expires_s
        self._client, self._source, self._deadline_s = client, source, deadline_s
        self._connection: Connection | None = connection
        self._on_corrupt = on_corrupt
        self._using = threading.Lock()

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        with self._reading(Deadline(self._deadline_s)):
            if 0 <= layer < self.key.fingerprint.n_layers:
                start = self._reader.lead_bytes + layer * self._reader.layer_bytes
                self._source.ask(start, min(start + 2 * self._reader.layer_bytes, self.nbytes))
            self._reader.layer_into(layer, keys, values)

    def read_into(self, out: SegmentKV) -> None:
        self.read_before(out, Deadline(self._deadline_s))

    def read_before(self, out: SegmentKV, deadline: Deadline) -> None:
        """As ``read_into``, with a deadline for all of it."""
        out.check(self.key.fingerprint, len(self.segment))
        with self._reading(deadline):
            self._source.ask(self._reader.lead_bytes, self.nbytes)
            self._reader.read_into(out)

    def read_layers(self, rooms: Sequence[tuple[torch.Tensor, torch.Tensor]], deadline: Deadline) -> Iterator[int]:
        """As Handle.read_layers: all is asked for at once, and each layer must come within a read's deadline too."""
        with self._reading(deadline):
            self._source.ask(self._reader.lead_bytes, self.nbytes)
        for layer, (keys, values) in enumerate(rooms):
            with self._reading(Deadline(max(min(self._deadline_s, deadline.left()), 0.001))):
                self._reader.layer_into(layer, keys, values)
            yield layer

    def release(self) -> None:
        with self._using:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            self._source.deadline = Deadline(1.0)
            try:
                self._source.drain()
                if not connection.broken:
                    connection.tell({"call": "release", "lease": self._source.lease}, self._source.deadline)
            except KVCommError:
                connection.broken = True
            self._client.give(connection)

    @contextmanager
    def _reading(self, deadline: Deadline) -> Iterator[None]:
        with self._using:
            if self._connection is None:
                raise StoreUnavailable(f"the handle of {self.key} was released; get it again")
            if self._connection.broken:
                raise StoreUnavailable(f"the connection that {self.key} was read over is lost; get it again")
            self._source.deadline = deadline
            try:
                yield
            except CorruptEntry:
                self._on_corrupt(self.key)
                raise


def open_entry(
    client: Client, key: CacheKey, lease_s: float, deadline: Deadline, on_corrupt: OnCorrupt
) -> RemoteHandle | None:
    """Pin an entry of the service, or None. Raises as ``Store.get``."""
    request = {"call": "open", "key": key_text(key), "lease_ms": max(1, int(lease_s * 1000))}

    def work(connection: Connection) -> RemoteHandle | None:
        answer = connection.ask(request, deadline)
        if not answer.header.truth("found"):
            return None
        lease, size = answer.header.integer("lease", 1, 2**53), answer.header.integer("nbytes", 1, MAX_NBYTES)
        left = answer.header.optional_integer("left_ms", 0, 2**53)
        answer.header.end()
        expires = None if left is None else time.time() + left / 1000
        source = RemoteSource(connection, lease, size, answer.payload, deadline)
        try:
            return RemoteHandle(client, connection, source, key, expires, deadline.seconds, on_corrupt)
        except CorruptEntry:
            on_corrupt(key)
            raise

    return client.run(work, deadline, keeps=lambda handle: handle is not None)
