"""How an entry lies in Redis: a manifest under its name, and parts of equal size under names of their own.

    prefix:namespace:e:{name}                      manifest: 40 fixed bytes, then the entry's first bytes
    prefix:namespace:p:{name}:generation:number    parts: the rest, each ``part_bytes`` long, the last one shorter

The manifest is written last and names a generation, random for each put, so a value is whole or absent and parts of two
puts never mix. A namespace's keys share a beginning, which an ACL rule can bind a user to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvcomm.errors import CorruptEntry, InvalidInput, StoreUnavailable
from kvcomm.store.codec import FIRST_READ_BYTES, EntryWriter

MAGIC = b"\x89KVR\r\n\x1a\n"
_FIXED = struct.Struct("<8s16sQII")
FIXED_BYTES = _FIXED.size
MIN_PART_BYTES = 64 << 10
MAX_PART_BYTES = 256 << 20
MAX_NBYTES = 1 << 44
GRACE_S = 30.0  # parts outlive their manifest by that, so that a read that began goes on
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PartGone(StoreUnavailable):
    """A part of an entry is not there any more: Redis evicted it, or somebody deleted the entry."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest's fixed bytes say. The entry is ``lead_bytes`` in the manifest and the rest in the parts."""

    generation: bytes
    nbytes: int
    lead_bytes: int
    part_bytes: int

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises CorruptEntry."""
        if len(raw) < FIXED_BYTES:
            raise CorruptEntry(f"a manifest has {len(raw)} bytes, fewer than {FIXED_BYTES}; the entry is not used")
        magic, generation, nbytes, lead, part = _FIXED.unpack_from(raw)
        sizes = 0 < lead <= nbytes <= MAX_NBYTES and MIN_PART_BYTES <= part <= MAX_PART_BYTES
        if magic != MAGIC or not sizes:
            raise CorruptEntry("a manifest starts with other bytes or has impossible sizes; the entry is not used")
        return cls(generation, nbytes, lead, part)

    def encode(self) -> bytes:
        """The fixed bytes."""
        return _FIXED.pack(MAGIC, self.generation, self.nbytes, self.lead_bytes, self.part_bytes)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-(self.nbytes - self.lead_bytes) // self.part_bytes)

    def size_of(self, number: int) -> int:
        """Bytes of one part."""
        return min(self.part_bytes, self.nbytes - self.lead_bytes - number * self.part_bytes)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of keys in Redis.

    Attributes:
        prefix: what all of this application's keys begin with.
        spread: in a cluster, whether an entry's parts lie on all nodes rather than on one. What stands in braces is
            what Redis Cluster places a key by.
    """

    prefix: str
    spread: bool = False

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidInput(f"prefix {self.prefix[:80]!r} is not 1 to 64 of [A-Za-z0-9._-]; choose such a one")

    def manifest(self, namespace: str, name: str) -> str:
        """Key of an entry's manifest."""
        return f"{self.prefix}:{namespace}:e:{{{name}}}"

    def parts(self, namespace: str, name: str, manifest: Manifest) -> list[str]:
        """Keys of an entry's parts, in order."""
        return [self.part(namespace, name, manifest.generation, number) for number in range(manifest.parts)]

    def part(self, namespace: str, name: str, generation: bytes, number: int) -> str:
        """Key of one part."""
        tag = f"{name}:{number}" if self.spread else name
        return f"{self.prefix}:{namespace}:p:{{{tag}}}:{generation.hex()}:{number}"

    def blob(self, namespace: str, fingerprint: str, name: str) -> str:
        """Key of a named blob."""
        return f"{self.prefix}:{namespace}:b:{fingerprint[:16]}:{name}"

    def pattern(self, namespace: str | None, kind: str) -> str:
        """For a scan: all keys of a kind, ``e``, ``p``, ``b`` or ``*``. No name holds a character that means more."""
        return f"{self.prefix}:{namespace or '*'}:{kind}:*"

    def split(self, key: str) -> tuple[str, str]:
        """(namespace, name) of a manifest's key."""
        _, namespace, _, tag = key.split(":", 3)
        return namespace, tag[1:-1]


class RedisSource:
    """An entry's bytes, see ``codec.Source``: the first from the manifest, the others from parts as they are asked for.

    Args:
        manifest: where the entry's bytes lie.
        fetch: (part, start, end) -> bytes; fewer where the part is cut, none or None where it is not there.
        lead: what came with the manifest, ``lead_bytes`` of the entry.

    ``whole`` fetches parts whole and keeps the last one, for reads in order; otherwise just the bytes that are wanted.
    """

    def __init__(self, manifest: Manifest, lead: bytes, fetch: Callable[[int, int, int], bytes | None]) -> None:
        if len(lead) != manifest.lead_bytes:
            raise CorruptEntry(f"a manifest holds {len(lead)} bytes, not {manifest.lead_bytes}; the entry is not used")
        self.size = manifest.nbytes
        self.whole = False
        self._manifest, self._lead, self._fetch = manifest, memoryview(lead), fetch
        self._kept: tuple[int, memoryview] | None = None

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from ``offset``. Raises PartGone."""
        end = offset + sum(map(len, buffers))
        if end > self.size:
            raise CorruptEntry(f"the entry ends at byte {self.size}, {end} were asked for; it is not used")
        pieces = self._pieces(offset, end)
        piece = memoryview(b"")
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                if not len(piece):
                    piece = next(pieces)
                step = min(len(piece), len(buffer) - at)
                buffer[at : at + step] = piece[:step]
                piece, at = piece[step:], at + step

    def forget(self) -> None:
        """Let go of the part that is kept."""
        self._kept = None

    def _pieces(self, start: int, end: int) -> Iterator[memoryview]:
        lead, size = self._manifest.lead_bytes, self._manifest.part_bytes
        if start < lead:
            yield self._lead[start : min(end, lead)]
        start = max(start - lead, 0)
        while start < end - lead:
            number, low = divmod(start, size)
            high = min(size, end - lead - number * size)
            yield self._piece(number, low, high)
            start = number * size + high

    def _piece(self, number: int, low: int, high: int) -> memoryview:
        if self._kept is not None and self._kept[0] == number:
            return self._kept[1][low:high]
        full = self._manifest.size_of(number)
        start, end = (0, full) if self.whole else (low, high)
        data = self._fetch(number, start, end)
        if not data:
            raise PartGone("Redis holds only a part of the entry: the rest was evicted or deleted; compute it again")
        if len(data) != end - start:
            raise CorruptEntry(f"part {number} gives {len(data)} bytes, not {end - start}; the entry is not used")
        if self.whole:
            self._kept = (number, memoryview(data))
            return self._kept[1][low:high]
        return memoryview(data)


def split_lead(writer: EntryWriter) -> tuple[bytes, Iterator[memoryview]]:
    """An entry's first bytes (head and token ids, and at least what a reader reads first), and buffers of the rest."""
    frames = iter(writer)
    lead = bytearray(b"".join([*next(frames), *next(frames)]))
    rest: Iterator[memoryview] = (buffer for frame in frames for buffer in frame)
    while len(lead) < min(FIRST_READ_BYTES, writer.nbytes):
        buffer = next(rest)
        wanted = FIRST_READ_BYTES - len(lead)
        lead += buffer[:wanted]
        if len(buffer) > wanted:
            rest = chain([buffer[wanted:]], rest)
    return bytes(lead), rest
