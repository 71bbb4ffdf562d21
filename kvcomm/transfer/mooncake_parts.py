"""A value to parts and back through registered slots, as many at a time as the loan has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvcomm.errors import CorruptEntry
from kvcomm.store.base import Deadline
from kvcomm.transfer.mooncake_config import Placing
from kvcomm.transfer.mooncake_engine import MooncakeEngine
from kvcomm.transfer.mooncake_manifest import Manifest
from kvcomm.transfer.mooncake_staging import Loan


def write_parts(
    engine: MooncakeEngine, manifest: Manifest, prefix: str, value: Iterable[Sequence[memoryview]], placing: Placing,
    deadline: Deadline,
) -> None:  # fmt: skip
    """Put all parts of ``value``, which comes in buffers. Raises StoreUnavailable; some parts may be there then."""
    names, sizes = manifest.part_names(prefix), manifest.sizes
    bytes_left = _Joined(buffer for buffers in value for buffer in buffers)
    start = 0
    while start < len(names):
        with engine.parts.lend(len(names) - start, deadline) as loan:
            end = start + len(loan)
            for slot, size in enumerate(sizes[start:end]):
                bytes_left.fill(loan.view(slot)[:size])
            engine.put_parts(names[start:end], loan, sizes[start:end], placing, manifest.tag.hex(), deadline)
        start = end


class PartsSource:
    """A value's bytes, read part by part into a loan; see ``codec.Source``. A part that is not there: PartMissing."""

    def __init__(self, engine: MooncakeEngine, manifest: Manifest, prefix: str, loan: Loan, deadline: Deadline) -> None:
        self.size = manifest.nbytes
        self._engine, self._loan, self._deadline = engine, loan, deadline
        self._part_bytes, self._sizes = manifest.part_bytes, manifest.sizes
        self._names = manifest.part_names(prefix)
        self._loaded = range(0)

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from ``offset``."""
        for buffer in buffers:
            if offset + len(buffer) > self.size:
                raise CorruptEntry(f"value ends at byte {self.size}, {offset + len(buffer)} were asked for")
            done = 0
            while done < len(buffer):
                part, at = divmod(offset, self._part_bytes)
                count = min(len(buffer) - done, self._sizes[part] - at)
                buffer[done : done + count] = self._view(part)[at : at + count]
                done += count
                offset += count

    def _view(self, part: int) -> memoryview:
        if part not in self._loaded:
            self._loaded = range(0)
            wanted = range(part, min(part + len(self._loan), len(self._names)))
            names, sizes = self._names[part : wanted.stop], self._sizes[part : wanted.stop]
            self._engine.get_parts(names, self._loan, sizes, self._deadline)
            self._loaded = wanted
        return self._loan.view(part - self._loaded.start)


class _Joined:
    """Buffers one after another, taken in pieces of any size."""

    def __init__(self, buffers: Iterator[memoryview]) -> None:
        self._buffers = buffers
        self._current = memoryview(b"")

    def fill(self, out: memoryview) -> None:
        done = 0
        while done < len(out):
            if not self._current:
                self._current = next(self._buffers)
            count = min(len(out) - done, len(self._current))
            out[done : done + count] = self._current[:count]
            self._current = self._current[count:]
            done += count
