"""Putting one entry: in one frame if it is small, else in parts that are sent again only where they did not arrive."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from kvcomm.errors import ProtocolError, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.base import Deadline, Entry, Receipt
from kvcomm.store.codec import EntryWriter
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import MAX_PART_BYTES
from kvcomm.transfer.names import MAX_NBYTES, key_text, left_ms
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import cut

WHOLE_BYTES = 1 << 20
LEASE_S = 30.0
_WINDOW = 4


def put_entry(client: Client, key: CacheKey, entry: Entry, deadline: Deadline) -> Receipt:
    """Send an entry, whose tensors are not copied if they are contiguous and in host memory.

    Raises:
        KVCommError: as ``Store.put``; AccessDenied too.
    """
    now = time.time()
    writer = EntryWriter(key, entry, "raw", now, entry.ends(now))
    left = left_ms(entry.expires_s)
    if writer.nbytes <= WHOLE_BYTES:
        buffers = [buffer for part in writer for buffer in part]
        answer = client.call({"call": "put", "left_ms": left}, deadline, buffers, checked=False)
        return _receipt(answer.header)
    upload = secrets.token_hex(16)

    def work(connection: Connection) -> Receipt:
        commit = {"call": "commit", "upload": upload, "left_ms": left}
        found = send_parts(connection, writer, writer.nbytes, upload, deadline, commit, key)
        return Receipt(False, found, writer.nbytes) if isinstance(found, bool) else _receipt(found)

    return client.run(work, deadline)


class _Pieces:
    """Frames as they are made, cut where parts end: a frame's checksum is taken while those before it are sent."""

    def __init__(self, frames: Iterable[list[memoryview]]) -> None:
        self._frames = iter(frames)
        self._left: list[memoryview] = []

    def take(self, nbytes: int) -> Iterator[list[memoryview]]:
        """The next ``nbytes`` bytes."""
        while nbytes:
            frame = self._left or next(self._frames)
            piece = cut(frame, 0, nbytes)
            size = sum(map(len, piece))
            self._left = cut(frame, size, sum(map(len, frame)) - size)
            nbytes -= size
            yield piece


def send_parts(
    connection: Connection, frames: Iterable[list[memoryview]], nbytes: int, upload: str, deadline: Deadline,
    last: Mapping[str, object], key: CacheKey | None,
) -> Members | bool:  # fmt: skip
    """Send those parts of an upload that the service does not have, and behind them the call ``last``.

    Args:
        frames: the same bytes whenever they are iterated, ``nbytes`` of them.
        key: of an entry, which carries its own checks; None for a blob, whose parts get one each.

    Returns:
        What ``last`` was answered with; where the service holds the key already, whether durably.
    """
    request: dict[str, object] = {
        "call": "begin", "upload": upload, "nbytes": nbytes, "lease_ms": int(LEASE_S * 1000), "entry": key is not None,
    }  # fmt: skip
    if key is not None:
        request["key"] = key_text(key)
    begun = connection.ask(request, deadline).header
    held, size, durable = begun.truth("held"), begun.integer("part_bytes", 1, MAX_PART_BYTES), begun.truth("durable")
    if held:
        return durable
    there = set(begun.integers("parts", 0, MAX_NBYTES, 2**20))
    waiting: deque[int] = deque()
    pieces = _Pieces(frames)
    try:
        for part, start in enumerate(range(0, nbytes, size)):
            length = min(size, nbytes - start)
            taken = pieces.take(length)
            if part in there:
                deque(taken, 0)
                continue
            header = {"call": "part", "upload": upload, "part": part}
            if key is not None:
                waiting.append(connection.stream(header, deadline, taken, length))
            else:
                waiting.append(connection.send(header, deadline, [b for piece in taken for b in piece]))
            while len(waiting) >= _WINDOW:
                _taken(connection, waiting.popleft(), deadline)
        number = connection.send(last, deadline)
        while waiting:
            _taken(connection, waiting.popleft(), deadline)
    except BaseException:
        connection.broken = True  # answers to other parts are still to come
        raise
    return connection.answer(number, deadline).header


def _taken(connection: Connection, number: int, deadline: Deadline) -> None:
    preamble, _ = connection.next(number, deadline)
    if preamble.payload_bytes:
        raise ProtocolError("an answer to a part has a payload; the connection is closed")


def _receipt(found: Members) -> Receipt:
    receipt = Receipt(found.truth("stored"), found.truth("durable"), found.integer("nbytes", 0, MAX_NBYTES))
    found.end()
    return receipt


def write_blob(client: Client, header: Mapping[str, object], data: bytes, deadline: Deadline) -> bool:
    """Send a blob in parts and put it in place of the one that ``header`` names by its digest; whether it was that."""
    if not data:
        raise StoreUnavailable("an empty blob cannot be sent; delete it instead")
    upload = secrets.token_hex(16)

    def work(connection: Connection) -> bool:
        last = {**header, "upload": upload}
        found = send_parts(connection, [[memoryview(data)]], len(data), upload, deadline, last, None)
        return found if isinstance(found, bool) else found.truth("written")

    return client.run(work, deadline)
