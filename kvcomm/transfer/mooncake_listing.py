"""Rows of the catalogue as listings: an entry's first bytes, checked as those of a file are."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm.errors import CorruptEntry
from kvcomm.store.base import Listing
from kvcomm.store.codec import FIRST_READ_BYTES, EntryReader
from kvcomm.store.seal import Keyring
from kvcomm.transfer.catalogue import Row
from kvcomm.transfer.mooncake_manifest import Manifest


class _Start:
    """An entry of which only the first bytes are here; the rest reads as zeros, and nothing of it is used."""

    def __init__(self, start: bytes, size: int) -> None:
        self._start, self.size = start.ljust(FIRST_READ_BYTES, b"\0"), size

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Copy from the start."""
        for buffer in buffers:
            if offset + len(buffer) > len(self._start):
                raise CorruptEntry(f"a row holds {len(self._start)} bytes of its entry; it is not used")
            buffer[:] = self._start[offset : offset + len(buffer)]
            offset += len(buffer)


def row_of(name: str, manifest: Manifest, start: memoryview) -> Row:
    """The row of a value that starts with ``start``: preamble and header."""
    return Row(name, manifest.tag, manifest.part_bytes, manifest.nbytes, manifest.expires_s, bytes(start))


def listed(row: Row, namespace: str, keyring: Keyring | None) -> Listing | None:
    """The entry as it is listed; None if the row fails its check."""
    try:
        reader = EntryReader(_Start(row.start, row.nbytes), namespace, None, keyring)
    except CorruptEntry:
        return None
    head = reader.head
    return Listing(
        head.key, head.tokens, row.nbytes, head.encoding, head.attributes, head.created_s, row.expires_s
    )  # fmt: skip
