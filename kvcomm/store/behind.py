"""Writing behind: one thread that puts what a call need not wait for. Bounded by bytes; nobody waits but ``flush``."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcomm.store.base import Deadline

log = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_S = 5.0
_CLOSE_S = 10.0


class WriteBehind(Generic[T]):
    """A queue of items that stand for at most ``max_bytes``, and the thread that empties it: made when needed, and
    ended when there was nothing to do for a while.

    Args:
        write: writes one item; what it raises is logged, and the next one is written.
        max_bytes: of what waits or is being written.
        name: the thread's.
    """

    def __init__(self, write: Callable[[T], None], max_bytes: int, name: str) -> None:
        self._write, self._max_bytes, self._name = write, max_bytes, name
        self._queue: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, item: T, nbytes: int) -> bool:
        """Queue an item that stands for ``nbytes``; False if it does not fit, or the queue is closed."""
        with self._changed:
            if self._closed or self._bytes + nbytes > self._max_bytes:
                return False
            self._queue.append((item, nbytes))
            self._bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, deadline: Deadline) -> None:
        """Wait until all that was queued is written, or failed. Raises DeadlineExceeded."""
        with self._changed:
            while self._bytes:
                if not deadline.left():
                    raise deadline.error(f"writing {self._bytes} bytes behind")
                self._changed.wait(deadline.left())

    def close(self) -> None:
        """Take no more, and wait until the queue is empty, ten seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed or (not self._changed.wait(_IDLE_S) and not self._queue):
                        self._thread = None
                        return
                item, nbytes = self._queue.popleft()
            try:
                self._write(item)
            except Exception:
                log.exception("writing behind failed")
            finally:
                with self._changed:
                    self._bytes -= nbytes
                    self._changed.notify_all()
