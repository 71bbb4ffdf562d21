"""Registered memory that values go through on their way: pre-faulted once, cut into slots, lent and given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from kvcomm.store.base import Deadline
from kvcomm.store.codec import buffer_of


class Loan:
    """Slots lent to one call. Those that a hanging transfer may still write to come back only when it ends."""

    def __init__(self, pool: Slots, numbers: list[int]) -> None:
        self._pool, self._numbers = pool, numbers
        self._running: list[Future[object]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def address(self, index: int) -> int:
        """Address of the loan's slot ``index``."""
        return self._pool.address + self._numbers[index] * self._pool.slot_bytes

    def view(self, index: int) -> memoryview:
        """Its bytes."""
        start = self._numbers[index] * self._pool.slot_bytes
        return self._pool.room[start : start + self._pool.slot_bytes]

    def watch(self, future: Future[object]) -> None:
        """Note a transfer that uses the slots."""
        self._running = [f for f in self._running if not f.done()] + [future]

    def end(self) -> None:
        """Give the slots back, once no transfer runs."""
        running = [f for f in self._running if not f.cancel() and not f.done()]
        left = len(running)
        if not left:
            self._pool.give(self._numbers)
            return
        lock = threading.Lock()

        def done(_: Future[object]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                self._pool.give(self._numbers)

        for future in running:
            future.add_done_callback(done)


class Slots:
    """``count`` slots of ``slot_bytes`` in memory that the caller registered."""

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.count = memory.numel() // slot_bytes
        self.address, self.room = memory.data_ptr(), buffer_of(memory)
        self._memory = memory
        self._free = list(range(self.count))
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, most: int, deadline: Deadline) -> Iterator[Loan]:
        """One to ``most`` slots, at most half of all, so that two calls can always run where there are two slots.

        Raises:
            DeadlineExceeded: none came free in time.
        """
        most = max(1, min(most, (self.count + 1) // 2))
        with self._changed:
            while not self._free:
                if not self._changed.wait(deadline.left()) and not self._free:
                    raise deadline.error("waiting for staging memory")
            numbers = [self._free.pop() for _ in range(min(most, len(self._free)))]
        loan = Loan(self, numbers)
        try:
            yield loan
        finally:
            loan.end()

    def give(self, numbers: list[int]) -> None:
        """Take slots back."""
        with self._changed:
            self._free.extend(numbers)
            self._changed.notify_all()
