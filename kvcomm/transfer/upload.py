"""Putting one entry: in one frame if it is small, else in parts that are sent again only where they did not arrive."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence

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
    writer = EntryWriter(key, entry, "raw", time.time(), None)
    buffers = [buffer for part in writer for buffer in part]
    left = left_ms(entry.expires_s)
    if writer.nbytes <= WHOLE_BYTES:
        answer = client.call({"call": "put", "left_ms": left}, deadline, buffers, checked=False)
        return _receipt(answer.header)
    upload = secrets.token_hex(16)

    def work(connection: Connection) -> Receipt:
        durable = send_parts(connection, buffers, upload, deadline, key)
        if durable is not None:
            return Receipt(False, durable, writer.nbytes)
        return _receipt(connection.ask({"call": "commit", "upload": upload, "left_ms": left}, deadline).header)

    return client.run(work, deadline)


def send_parts(
    connection: Connection, buffers: Sequence[memoryview], upload: str, deadline: Deadline, key: CacheKey | None
) -> bool | None:
    """Send those parts of an upload that the service does not have.

    Returns:
        None if it has them all now; if ``key`` was given and the service holds it already, whether durably.
    """
    nbytes = sum(map(len, buffers))
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
    try:
        for part, start in enumerate(range(0, nbytes, size)):
            if part in there:
                continue
            header = {"call": "part", "upload": upload, "part": part}
            waiting.append(connection.send(header, deadline, cut(buffers, start, size), checked=key is None))
            while len(waiting) >= _WINDOW:
                _taken(connection, waiting.popleft(), deadline)
        while waiting:
            _taken(connection, waiting.popleft(), deadline)
    except BaseException:
        connection.broken = True  # answers to other parts are still to come
        raise
    return None


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
        send_parts(connection, [memoryview(data)], upload, deadline, None)
        return connection.ask({**header, "upload": upload}, deadline).header.truth("written")

    return client.run(work, deadline)
