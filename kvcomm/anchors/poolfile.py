"""A pool and its learned offsets in one file, without a store: docs/format.md, "A pool in one file".

The file is a head, the offsets as a named blob, and the bases as entries of the store's format, one after another. It
is written whole or not at all, and nothing of a file that fails any check is used.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import Base, BasePool
from kvcomm.anchors.saved import BLOB, Learned, restore
from kvcomm.checks import need
from kvcomm.errors import CorruptEntry, FingerprintMismatch, InvalidInput
from kvcomm.keys import CacheKey
from kvcomm.store.base import Entry, empty_kv
from kvcomm.store.blobs import MAX_BLOB_BYTES
from kvcomm.store.codec import EntryReader, EntryWriter
from kvcomm.store.disk_handle import FileSource
from kvcomm.store.files import Files, trouble
from kvcomm.store.format import PREAMBLE_BYTES
from kvcomm.store.statistics import BLOB_HEAD_BYTES, decode_blob, encode_blob
from kvcomm.types import ModelFingerprint, Namespace, SegmentKV

MAGIC = b"\x89KVP\r\n\x1a\n"
VERSION = 1
_FIXED = struct.Struct("<8sHHIQQ32s128s")  # magic, version, flags, zero, entries, blob's bytes, fingerprint, namespace
HEAD_BYTES = _FIXED.size + 16
_LENGTH_AT = 24  # of an entry's length in its preamble


def save(path: Path | str, pool: BasePool, book: OffsetBook | None = None) -> int:
    """Write what ``pool`` holds in memory, its parents' too, and what ``book`` learned, in place of what was there.

    Returns:
        how many bases were written, the least recently used first.

    Raises:
        InvalidInput: the book belongs to another model, or its sums exceed 1 GiB.
        StoreUnavailable: the file could not be written; what was there stays.
    """
    need(path, (str, Path), "path", "give the name of a file")
    target, files = Path(path), Files()
    _check_book(pool, book)
    bases = _held(pool)
    owner = (pool.namespace, pool.fingerprint)
    learned = b"" if book is None else encode_blob(owner, BLOB, book.dump(), None)
    head = _head(pool.namespace, pool.fingerprint, len(bases), len(learned))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    with trouble(f"writing {target.name}"):
        fd = files.create(temporary)
        try:
            files.write(fd, [memoryview(head), memoryview(learned)])
            for base in bases:
                key = CacheKey.of(pool.namespace, pool.fingerprint, base.segment, base.recipe)
                kv = SegmentKV(base.kv.keys.cpu().contiguous(), base.kv.values.cpu().contiguous())
                for buffers in EntryWriter(key, Entry(base.segment, kv), "raw", time.time(), None):
                    files.write(fd, buffers)
            files.fsync(fd)
            files.rename(temporary, target)
        except BaseException:
            with suppress(OSError):
                files.unlink(temporary)
            raise
        finally:
            files.close(fd)
        files.fsync_folder(target.parent)
    return len(bases)


def load(path: Path | str, pool: BasePool, book: OffsetBook | None = None, device: torch.device | None = None) -> int:
    """Add the bases of a file to ``pool``, and let ``book``, which must have learned nothing, go on from its offsets.

    Bases that are held already stay as they are; the pool's limits hold. All is checked before anything is added.

    Args:
        device: where bases are used; host memory unless given.

    Returns:
        how many bases were added.

    Raises:
        FingerprintMismatch: the file is of another model, dtype, adapter or tokenizer.
        InvalidInput: it is of another namespace, is no regular file, or the book has learned something already.
        CorruptEntry: it is damaged, or no such file.
        StoreUnavailable: it could not be read.
    """
    need(path, (str, Path), "path", "give the name of a file")
    _check_book(pool, book)
    with _opened(Path(path)) as file:
        head = _read_head(file)
        _check_owner(head, pool)
        learned = _learned(file, head, pool)
        places = _places(file, head)
        for place in places:
            reader = _reader(file, place, pool)
            reader.verify()
        if book is not None and learned is not None and learned.statistics.pairs:
            book.take(learned)
        added = 0
        for place in places:
            reader = _reader(file, place, pool)
            kv = empty_kv(pool.fingerprint, reader.head.tokens)
            reader.read_into(kv)
            if device is not None:
                kv = SegmentKV(kv.keys.to(device), kv.values.to(device))
            added += pool.put(reader.segment(), reader.head.key.recipe, kv)
    return added


@dataclass(frozen=True)
class _Head:
    entries: int
    learned_bytes: int
    fingerprint: bytes
    namespace: str


class _Window(FileSource):
    """A stretch of an open file, read as if it were a file of its own."""

    def __init__(self, files: Files, fd: int, start: int, size: int) -> None:
        super().__init__(files, fd, size)
        self._start = start

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        if offset + sum(map(len, buffers)) > self.size:
            raise CorruptEntry(f"the file ends at byte {self._start + self.size}; it was cut")
        super().readv(buffers, self._start + offset)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from ``offset``; memory is taken only for those that are there."""
        if offset + count > self.size:
            raise CorruptEntry(f"the file ends at byte {self._start + self.size}; it was cut")
        data = bytearray(count)
        self.readv([memoryview(data)], offset)
        return bytes(data)

    def part(self, start: int, size: int) -> _Window:
        """A stretch of this one."""
        return _Window(self._files, self._fd, self._start + start, size)


@contextmanager
def _opened(path: Path) -> Iterator[_Window]:
    files = Files()
    with trouble(f"opening {path.name}"):
        fd = files.open(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput(f"{path.name} is no regular file; pass one that save() wrote")
        yield _Window(files, fd, 0, found.st_size)
    finally:
        files.close(fd)


def _head(namespace: Namespace, fingerprint: ModelFingerprint, entries: int, learned_bytes: int) -> bytes:
    digest, name = bytes.fromhex(fingerprint.digest), namespace.name.encode()
    fixed = _FIXED.pack(MAGIC, VERSION, 0, 0, entries, learned_bytes, digest, name)
    return fixed + xxhash.xxh3_128_digest(fixed)


def _read_head(file: _Window) -> _Head:
    data = file.read(0, HEAD_BYTES)
    fixed = data[: _FIXED.size]
    magic, version, flags, zero, entries, learned, fingerprint, name = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise CorruptEntry(f"the file starts with {magic!r}, not with {MAGIC!r}; it is no pool")
    if version != VERSION or flags or zero:
        raise CorruptEntry(f"pool format {version}, flags {flags:#x} are unknown, not {VERSION}; update kvcomm")
    if xxhash.xxh3_128_digest(fixed) != data[_FIXED.size :]:
        raise CorruptEntry("the pool's head fails its checksum; the file is not used")
    if learned > MAX_BLOB_BYTES + BLOB_HEAD_BYTES or entries * PREAMBLE_BYTES > file.size:
        raise CorruptEntry(f"the head names {entries} entries and {learned} bytes of offsets; the file is not used")
    return _Head(entries, learned, fingerprint, name.rstrip(b"\0").decode("ascii", "replace"))


def _check_owner(head: _Head, pool: BasePool) -> None:
    if head.fingerprint.hex() != pool.fingerprint.digest:
        raise FingerprintMismatch(
            f"the file has fingerprint {head.fingerprint.hex()[:12]}, the model {pool.fingerprint.digest[:12]}: KV of "
            "another model, dtype, adapter or tokenizer is never used"
        )
    if head.namespace != pool.namespace.name:
        raise InvalidInput(
            f"the file belongs to namespace {head.namespace[:140]!r}, the pool to {pool.namespace}; load it into an "
            "engine of its own namespace"
        )


def _check_book(pool: BasePool, book: OffsetBook | None) -> None:
    if book is not None and book.fingerprint != pool.fingerprint:
        raise FingerprintMismatch(
            f"the book has fingerprint {book.fingerprint.digest[:12]}, the pool {pool.fingerprint.digest[:12]}; pass "
            "the book that belongs to the pool"
        )


def _learned(file: _Window, head: _Head, pool: BasePool) -> Learned | None:
    if not head.learned_bytes:
        return None
    raw = file.read(HEAD_BYTES, head.learned_bytes)
    return restore(decode_blob((pool.namespace, pool.fingerprint), BLOB, raw, None), pool.fingerprint)


def _places(file: _Window, head: _Head) -> list[tuple[int, int]]:
    """Start and length of each entry; they must fill the file."""
    found, at = [], HEAD_BYTES + head.learned_bytes
    for _ in range(head.entries):
        length = int.from_bytes(file.read(at + _LENGTH_AT, 8), "little")
        if not PREAMBLE_BYTES <= length <= file.size - at:
            raise CorruptEntry(f"the entry at byte {at} says it has {length} bytes; the file was cut or changed")
        found.append((at, length))
        at += length
    if at != file.size:
        raise CorruptEntry(f"{file.size - at} bytes follow the last entry; the file is not used")
    return found


def _reader(file: _Window, place: tuple[int, int], pool: BasePool) -> EntryReader:
    reader = EntryReader(file.part(*place), pool.namespace.name)
    if reader.head.key.fingerprint != pool.fingerprint:
        raise CorruptEntry("an entry is of another model than the file's head says; the file is not used")
    return reader


def _held(pool: BasePool | None) -> list[Base]:
    """What a pool and its parents hold in memory, those of the parents first."""
    return [] if pool is None else [*_held(pool.parent), *pool]
