"""Memory of finished requests, kept for the next ones.

The KV of a prompt of some thousand tokens takes a hundred megabytes. Asked of the system anew at each call, its pages
are faulted in and cleared one by one, which on a CPU costs more than moving the KV itself. So a few blocks that nobody
holds any more are kept. Nobody has to say that he is done: a block comes back when the last tensor that lies in it is
gone, a view in somebody's cache included, and not before.

A block is handed out as it was left. Whoever takes one clears or overwrites all that he shows to others.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch

from kvcomm.errors import InvalidInput

DEFAULT_IDLE_BYTES = 512 << 20
_GRAIN = 2 << 20  # a huge page; prompts of nearly the same length then fit each other's blocks
_LARGEST_WASTE = 2  # a block is handed out for requests of at least this part of it


class BufferMemory:
    """Blocks of host memory, handed out as tensors. Safe to use from several threads.

    Args:
        max_idle_bytes: blocks that nobody holds are given back to the system, the oldest first, beyond this; 0 keeps
            none.

    Raises:
        InvalidInput: max_idle_bytes is negative.
    """

    def __init__(self, max_idle_bytes: int = DEFAULT_IDLE_BYTES) -> None:
        if max_idle_bytes < 0:
            raise InvalidInput(f"max_idle_bytes is {max_idle_bytes}; give 0 or more bytes")
        self.max_idle_bytes = max_idle_bytes
        self._idle: list[mmap.mmap] = []
        # Blocks come back in finalizers, which may run in the middle of any statement of the same thread.
        self._lock = threading.RLock()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept and held by nobody."""
        with self._lock:
            return sum(len(block) for block in tuple(self._idle))

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of undefined contents, for as long as it or any view of it lives."""
        block = self._kept(nbytes)
        if block is None:
            block = _fresh(max(-(-nbytes // _GRAIN), 1) * _GRAIN)
        array = np.frombuffer(block, dtype=np.uint8)
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def drop_idle(self) -> None:
        """Give everything that nobody holds back to the system."""
        with self._lock:
            self._idle.clear()

    def _kept(self, nbytes: int) -> mmap.mmap | None:
        """The smallest kept block that fits, no longer kept; None where there is none."""
        with self._lock:
            fitting = [block for block in tuple(self._idle) if nbytes <= len(block) <= _LARGEST_WASTE * nbytes + _GRAIN]
            for block in sorted(fitting, key=len):
                try:
                    self._idle.remove(block)
                except ValueError:  # a finalizer has just let go of it
                    continue
                return block
        return None

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(block)
            while self._idle and self.idle_bytes > self.max_idle_bytes:
                self._idle.pop(0)


def _fresh(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages only
    with suppress(OSError):  # a kernel without huge pages: small ones do as well, only slower
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
