"""How much is done at once. What exceeds it is refused soon, instead of waiting in a queue without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcomm.errors import Overloaded


class Admission:
    """At most ``slots`` calls work at once; another one waits ``patience_s`` for a slot and is then refused."""

    def __init__(self, slots: int = 16, patience_s: float = 0.02) -> None:
        self._slots = threading.BoundedSemaphore(slots)
        self._count, self._patience_s = slots, patience_s
        self.refused = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Work inside. Raises Overloaded."""
        if not self._slots.acquire(timeout=self._patience_s):
            self.refused += 1
            raise Overloaded(f"{self._count} calls are at work, the most at once; try again after a pause")
        try:
            yield
        finally:
            self._slots.release()
