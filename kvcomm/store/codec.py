"""One entry to bytes and back, a frame at a time, so that neither way holds more than one layer beside the entry.

The reader works on anything that can fill buffers from an offset: a file, a socket's buffer, bytes in memory.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import xxhash

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.keys import CacheKey
from kvcomm.store.base import Entry, check_layer
from kvcomm.store.encoding import encoding
from kvcomm.store.format import (
    CHECK_BYTES,
    PREAMBLE_BYTES,
    Frame,
    Head,
    Preamble,
    decode_header,
    decode_preamble,
    encode_head,
    frames,
    seed,
)
from kvcomm.store.seal import EntryCipher, Keyring
from kvcomm.types import Segment, SegmentKV

FIRST_READ_BYTES = 4096
_LITTLE = "<u4"


class Source(Protocol):
    """Where an entry's bytes come from."""

    size: int

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers from ``offset``. Raises CorruptEntry if they end before, StoreUnavailable on failure."""
        ...


class BytesSource:
    """An entry held in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self.size = len(self._data)

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Copy; see ``Source``."""
        for buffer in buffers:
            part = self._data[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise CorruptEntry(f"entry ends at byte {self.size}, {offset + len(buffer)} were asked for")
            buffer[:] = part
            offset += len(buffer)


def entry_name(key: CacheKey, keyring: Keyring | None) -> str:
    """Name of the key's file, 64 hex digits: the key's digest, or its HMAC where names must tell nothing."""
    return key.digest if keyring is None else keyring.opaque(key.namespace.name, key.digest)


class EntryWriter:
    """An entry as a list of buffers for each part; ``nbytes`` is known before the first part is made."""

    def __init__(
        self, key: CacheKey, entry: Entry, encoding_name: str, created_s: float, expires_s: float | None,
        keyring: Keyring | None = None,
    ) -> None:  # fmt: skip
        self._entry = entry
        self._encoding = encoding(encoding_name)
        name = bytes.fromhex(entry_name(key, keyring))
        salt = secrets.token_bytes(32)
        self._cipher = None if keyring is None else keyring.cipher(key.namespace.name, name, salt)
        self.head = Head(key, len(entry.segment), encoding_name, entry.attributes, created_s, expires_s)
        self._start, self._bound, self._frames = encode_head(self.head, name, salt, self._cipher)
        self.nbytes = self._frames[-1].offset + self._frames[-1].nbytes

    def __iter__(self) -> Iterator[list[memoryview]]:
        yield [memoryview(self._start)]
        ids = torch.tensor(self._entry.segment.token_ids, dtype=torch.int64).to(torch.uint32)
        yield self._frame(0, [ids])
        kv = self._entry.kv
        for layer in range(self.head.key.fingerprint.n_layers):
            yield self._frame(layer + 1, self._encoding.encode(kv.keys[layer], kv.values[layer]))

    def _frame(self, part: int, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
        frame = self._frames[part]
        buffers = [memoryview(frame.head), *[buffer_of(t) for t in tensors], memoryview(bytes(frame.padding))]
        if self._cipher is not None:
            return [memoryview(self._cipher.seal(part + 1, b"".join(buffers), self._bound))]
        return [*buffers, memoryview(checksum(self._bound, part, buffers))]


@dataclass(frozen=True, slots=True)
class CheckedHead:
    """A file's first bytes and what they were found to say. ``segment`` is set if they hold all token ids."""

    first: bytes
    preamble: Preamble
    cipher: EntryCipher | None
    head: Head
    frames: list[Frame]
    segment: Segment | None = None


class SeenHeads:
    """The heads of the entries read last, at most 256. Where a file starts with the same 4,096 bytes as when it was
    checked, and has the same length, the outcome is the same and parsing again would be in vain. Thread-safe."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._heads: dict[str, CheckedHead] = {}
        self._lock = threading.Lock()

    def find(self, key: CacheKey, first: bytes | bytearray, size: int) -> CheckedHead | None:
        """What was found for ``key``, if the file still starts with those bytes."""
        known = self._heads.get(key.digest)
        return known if known is not None and known.first == first and known.preamble.file_bytes == size else None

    def add(self, checked: CheckedHead) -> None:
        """Remember one, and forget the oldest if there are too many."""
        with self._lock:
            self._heads[checked.head.key.digest] = checked
            if len(self._heads) > self._limit:
                del self._heads[next(iter(self._heads))]


class EntryReader:
    """Reads one entry from a source. Making one checks preamble, header and token ids, and nothing of the layers.

    Attributes:
        lead_bytes: bytes before the first layer's frame: preamble, header and token ids.
        layer_bytes: bytes of each layer's frame.

    Raises:
        CorruptEntry: anything at all differs from what the format and ``key`` (if given) ask for.
    """

    def __init__(
        self, source: Source, namespace: str, key: CacheKey | None = None, keyring: Keyring | None = None,
        seen: SeenHeads | None = None,
    ) -> None:  # fmt: skip
        self._source, self._seen = source, seen
        start = bytearray(min(source.size, FIRST_READ_BYTES))
        source.readv([memoryview(start)], 0)
        known = None if seen is None or key is None else seen.find(key, start, source.size)
        self._checked = known or self._check(bytes(start), namespace, key, keyring)
        self._preamble, self._cipher = self._checked.preamble, self._checked.cipher
        self.head, self._frames = self._checked.head, self._checked.frames
        self._room: tuple[memoryview, memoryview] | None = None
        self.name = self._preamble.name.hex()
        self.nbytes, self.sealed = source.size, self._preamble.sealed
        self.lead_bytes, self.layer_bytes = self._frames[1].offset, self._frames[1].nbytes

    def _check(self, first: bytes, namespace: str, key: CacheKey | None, keyring: Keyring | None) -> CheckedHead:
        preamble = decode_preamble(first[:PREAMBLE_BYTES], self._source.size)
        cipher = _cipher(preamble, namespace, keyring)
        start, end = bytearray(first), PREAMBLE_BYTES + preamble.header_bytes
        if end > len(start):
            start = bytearray(min(self._source.size, end))
            self._source.readv([memoryview(start)], 0)
        head, placed = decode_header(preamble, bytes(start[PREAMBLE_BYTES:end]), cipher)
        found = head.key
        if key is not None and found != key:
            raise CorruptEntry(f"the file holds {found} where {key} was looked for; it is not used")
        named = entry_name(key or found, keyring)  # equal keys; the caller's has its digest already
        if found.namespace.name != namespace or named != preamble.name.hex():
            raise CorruptEntry(f"the file holds another entry than its name says, {found}; it is not used")
        return CheckedHead(first, preamble, cipher, head, placed)

    def segment(self) -> Segment:
        """The token ids, compared with the content digest in the key. Raises CorruptEntry."""
        if self._checked.segment is not None:
            return self._checked.segment
        ids = torch.empty(self.head.tokens, dtype=torch.uint32)
        self._read(0, [ids])
        segment = Segment.from_bytes(bytes(buffer_of(ids)))
        if segment.digest != self.head.key.content:
            raise CorruptEntry(f"token ids do not have the digest {self.head.key.content[:16]}; the entry is not used")
        if self._seen is not None and self._frames[1].offset <= len(self._checked.first):
            self._seen.add(replace(self._checked, segment=segment))
        return segment

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Read and check one layer into ``keys`` and ``values`` [kv heads, tokens, head dim].

        Raises:
            InvalidInput: no such layer, wrong shape or dtype.
            CorruptEntry: the check failed; the destination holds zeros.
        """
        head = self.head
        check_layer(head.key.fingerprint, head.tokens, layer, (keys, values))
        kind = encoding(head.encoding)
        direct = kind.dtype is None and all(t.is_contiguous() and t.device.type == "cpu" for t in (keys, values))
        parts = [keys, values] if direct else _room(self._frames[layer + 1])
        try:
            self._read(layer + 1, parts)
        except BaseException:
            keys.zero_()
            values.zero_()
            raise
        if not direct:
            kind.decode(parts, keys, values)

    def read_into(self, out: SegmentKV) -> None:
        """All layers into ``out``, which must have been checked to fit. Errors as for ``layer_into``."""
        parts = (out.keys, out.values)
        if self.head.encoding != "raw" or not all(t.is_contiguous() and t.device.type == "cpu" for t in parts):
            for layer in range(self.head.key.fingerprint.n_layers):
                self.layer_into(layer, out.keys[layer], out.values[layer])
            return
        keys, values = (buffer_of(t) for t in parts)
        size = self._frames[1].specs[0].nbytes
        try:
            for layer, at in enumerate(range(0, len(keys), size)):
                self._fill(layer + 1, [keys[at : at + size], values[at : at + size]])
        except BaseException:
            out.keys.zero_()
            out.values.zero_()
            raise

    def _scratch(self, nbytes: int) -> tuple[memoryview, memoryview]:
        """Room for a sealed frame and its plaintext, kept for the next: fresh memory costs as much as reading."""
        if self._room is None or len(self._room[0]) < nbytes:
            self._room = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        return self._room[0][:nbytes], self._room[1][: nbytes - CHECK_BYTES]

    def verify(self) -> None:
        """Read and check everything. Raises CorruptEntry."""
        self.segment()
        for part in range(1, len(self._frames)):
            self._read(part, _room(self._frames[part]))

    def check_frame(self, part: int, data: memoryview) -> None:
        """Check a plain frame where it lies in ``data``, the whole entry. Raises CorruptEntry."""
        frame = self._frames[part]
        end = frame.offset + frame.nbytes - CHECK_BYTES
        if checksum(self._preamble.bound, part, [data[frame.offset : end]]) != data[end : end + CHECK_BYTES]:
            raise CorruptEntry(f"frame {part} fails its checksum; the entry is not used")
        _match_head(frame, data[frame.offset : frame.offset + len(frame.head)])

    def _read(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        self._fill(part, [buffer_of(t) for t in tensors])

    def _fill(self, part: int, data: Sequence[memoryview]) -> None:
        frame = self._frames[part]
        if self._cipher is not None:
            sealed, plain = self._scratch(frame.nbytes)
            self._source.readv([sealed], frame.offset)
            self._cipher.open_into(part + 1, sealed, self._preamble.bound, plain)
            _match_head(frame, plain[: len(frame.head)])
            at = len(frame.head)
            for buffer in data:
                buffer[:] = plain[at : at + len(buffer)]
                at += len(buffer)
            return
        edge = bytearray(len(frame.head) + frame.padding + CHECK_BYTES)
        head, rest = memoryview(edge)[: len(frame.head)], memoryview(edge)[len(frame.head) :]
        self._source.readv([head, *data, rest], frame.offset)
        check = checksum(self._preamble.bound, part, [head, *data, rest[: frame.padding]])
        if check != rest[frame.padding :]:
            raise CorruptEntry(f"frame {part} fails its checksum; the entry is not used")
        _match_head(frame, head)


def entry_view(data: memoryview, namespace: str, checked: int = 0) -> tuple[Head, Entry]:
    """A plain, ``raw`` entry that lies whole in memory, every byte checked; its KV are views of ``data``, not copies.

    Args:
        checked: how many layers were checked before, and have not changed since.

    Raises:
        CorruptEntry: anything at all differs from what the format asks for.
    """
    reader = EntryReader(BytesSource(data), namespace)
    head, segment = reader.head, reader.segment()
    if head.encoding != "raw":
        raise CorruptEntry(f"an entry in encoding {head.encoding} cannot be viewed; send it as raw")
    model, at = head.key.fingerprint, reader.lead_bytes
    for part in range(checked + 1, model.n_layers + 1):
        reader.check_frame(part, data)
    spec = layer_frame(head).specs[0]
    width = spec.dtype.itemsize
    flat = torch.frombuffer(data, dtype=spec.dtype, offset=at, count=model.n_layers * reader.layer_bytes // width)
    shape = (model.n_layers, *spec.shape)
    strides = (reader.layer_bytes // width, head.tokens * model.head_dim, model.head_dim, 1)
    first = len(layer_frame(head).head) // width
    keys, values = (flat.as_strided(shape, strides, first + n * spec.nbytes // width) for n in range(2))
    return head, Entry(segment, SegmentKV(keys, values), head.attributes)


def layer_frame(head: Head) -> Frame:
    """Where the first layer's frame would lie in an entry without a lead."""
    return frames(head, 0)[1]


def checksum(bound: bytes, part: int, buffers: Sequence[memoryview]) -> bytes:
    """16 bytes over ``buffers`` in order, different for each file and frame."""
    hasher = xxhash.xxh3_128(seed=seed(bound, part))
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.digest()


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied; writing to them writes to the tensor."""
    if not tensor.is_contiguous():
        raise InvalidInput(f"tensor with strides {tensor.stride()} is not contiguous; call contiguous() first")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type,unused-ignore]


def _room(frame: Frame) -> list[torch.Tensor]:
    return [torch.empty(spec.shape, dtype=spec.dtype) for spec in frame.specs]


def _match_head(frame: Frame, head: memoryview) -> None:
    if head != frame.head:
        raise CorruptEntry("a frame describes other tensors than the key asks for; the entry is not used")


def _cipher(preamble: Preamble, namespace: str, keyring: Keyring | None) -> EntryCipher | None:
    if preamble.sealed != (keyring is not None):
        found, store = ("sealed", "plain") if preamble.sealed else ("plain", "sealed")
        raise CorruptEntry(f"a {found} entry lies in a {store} store; it is not used")
    return None if keyring is None else keyring.cipher(namespace, preamble.name, preamble.salt)
