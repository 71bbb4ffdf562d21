"""What is held in a cluster that cannot be listed: rows in named blobs, of a service, a folder or this process.

A row holds an entry's own first bytes, sealed where the entry is, so a listing is checked as a file is. Rows lie in 64
shards a namespace, each replaced whole, under a fingerprint that no model has.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvcomm.errors import CorruptEntry
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import Blobs, Owner
from kvcomm.types import ModelFingerprint, Namespace

SHARDS = 64
MAX_ROWS = 1024
_NOBODY = ModelFingerprint("kvcomm.catalogue", "", "", "uint8", "", "", 1, 1, 1)
_ROW = struct.Struct("<32s16sIQdI")
_START = struct.Struct("<8sI")
_MAGIC = b"\x89KVL\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One value: its name (64 hex digits), what its parts are called, its end, and its first bytes."""

    name: str
    tag: bytes
    part_bytes: int
    nbytes: int
    expires_s: float | None
    start: bytes


class Catalogue:
    """Rows by name. The oldest of a shard go when it has more than 1,024, 65,536 a namespace.

    Raises:
        StoreUnavailable: the blobs could not be read or written; all methods.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def add(self, namespace: Namespace, row: Row, deadline: Deadline) -> list[Row]:
        """Add or replace a row; those that had to go for it."""
        gone: list[Row] = []

        def change(rows: dict[str, Row]) -> None:
            gone.clear()
            old = rows.pop(row.name, None)
            rows[row.name] = row
            gone.extend([old] if old is not None and old.tag != row.tag else [])
            while len(rows) > MAX_ROWS:
                gone.append(rows.pop(next(iter(rows))))

        self._change(namespace, row.name, change, deadline)
        return gone

    def remove(self, namespace: Namespace, name: str, tag: bytes | None, deadline: Deadline) -> None:
        """Remove a row, if ``tag`` (when given) is still its tag."""

        def change(rows: dict[str, Row]) -> None:
            if name in rows and tag in (None, rows[name].tag):
                del rows[name]

        self._change(namespace, name, change, deadline)

    def renew(self, namespace: Namespace, name: str, expires_s: float, deadline: Deadline) -> None:
        """Note a later end."""

        def change(rows: dict[str, Row]) -> None:
            if name in rows and rows[name].expires_s is not None:
                rows[name] = replace(rows[name], expires_s=expires_s)

        self._change(namespace, name, change, deadline)

    def rows(self, namespace: Namespace) -> Iterator[Row]:
        """All rows of a namespace. A shard that fails its check counts as empty."""
        owner = (namespace, _NOBODY)
        for blob in list(self._blobs.names(owner)):
            with suppress(CorruptEntry):
                yield from _decode(self._blobs.read(owner, blob)).values()

    def _change(
        self, namespace: Namespace, name: str, change: Callable[[dict[str, Row]], None], deadline: Deadline
    ) -> None:
        owner: Owner = (namespace, _NOBODY)
        shard = f"rows.{int(name[:2], 16) % SHARDS:02d}"

        def merge(old: bytes | None) -> bytes:
            rows: dict[str, Row] = {}
            with suppress(CorruptEntry):
                rows = _decode(old)
            change(rows)
            return _encode(rows)

        if not deadline.left():
            raise deadline.error("the catalogue")
        self._blobs.update(owner, shard, merge, deadline_s=deadline.left())


def _encode(rows: dict[str, Row]) -> bytes:
    parts = [_START.pack(_MAGIC, len(rows))]
    for row in rows.values():
        fixed = _ROW.pack(
            bytes.fromhex(row.name), row.tag, row.part_bytes, row.nbytes, row.expires_s or 0.0, len(row.start)
        )  # fmt: skip
        parts += [fixed, row.start]
    return b"".join(parts)


def _decode(data: bytes | None) -> dict[str, Row]:
    if data is None:
        return {}
    try:
        magic, count = _START.unpack_from(data)
        if magic != _MAGIC or count > MAX_ROWS:
            raise CorruptEntry(f"a catalogue starts with {magic!r} and says {count} rows; it is not used")
        rows: dict[str, Row] = {}
        at = _START.size
        for _ in range(count):
            name, tag, part_bytes, nbytes, ends, length = _ROW.unpack_from(data, at)
            at += _ROW.size
            rows[name.hex()] = Row(name.hex(), tag, part_bytes, nbytes, ends or None, data[at : at + length])
            at += length
    except struct.error as error:
        raise CorruptEntry(f"a catalogue is cut short: {error}; it is not used") from error
    if at != len(data):
        raise CorruptEntry(f"a catalogue has {len(data)} bytes and describes {at}; it is not used")
    return rows
