"""Places in a fixed range of bytes: best fit, neighbours joined when freed."""

from __future__ import annotations

from bisect import bisect_left, insort

from kvcomm.errors import InvalidInput

ALIGN = 64


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the arena's alignment."""
    return -(-nbytes // ALIGN) * ALIGN


class Extents:
    """Allocator of ``capacity`` bytes. Not thread-safe; the caller holds a lock.

    Raises:
        InvalidInput: the capacity is under 64 bytes.
    """

    def __init__(self, capacity: int) -> None:
        capacity = capacity // ALIGN * ALIGN
        if capacity < ALIGN:
            raise InvalidInput(f"arena of {capacity} bytes is too small; give it at least {ALIGN}")
        self.capacity = capacity
        self.free_bytes = capacity
        self._size_at: dict[int, int] = {0: capacity}
        self._start_of_end: dict[int, int] = {capacity: 0}
        self._by_size: list[tuple[int, int]] = [(capacity, 0)]

    def alloc(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` (aligned up), or None if no hole is large enough."""
        size = aligned(nbytes)
        found = bisect_left(self._by_size, (size, -1))
        if found == len(self._by_size):
            return None
        hole, offset = self._by_size[found]
        self._take(hole, offset)
        if hole > size:
            self._give(hole - size, offset + size)
        self.free_bytes -= size
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what ``alloc(nbytes)`` returned."""
        size = aligned(nbytes)
        self.free_bytes += size
        before = self._start_of_end.get(offset)
        if before is not None:
            length = offset - before
            self._take(length, before)
            offset, size = before, size + length
        after = self._size_at.get(offset + size)
        if after is not None:
            self._take(after, offset + size)
            size += after
        self._give(size, offset)

    def _take(self, size: int, offset: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._start_of_end[offset + size]

    def _give(self, size: int, offset: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset
