"""Writing behind: one thread that puts into lower tiers what was put into the fastest. Bounded by bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvcomm.keys import CacheKey
from kvcomm.store.base import Deadline

Write = Callable[[CacheKey, tuple[int, ...]], None]


class WriteBehind:
    """A queue of keys whose entries take at most ``max_bytes``, and the thread that empties it, made when needed."""

    def __init__(self, write: Write, max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._queue: deque[tuple[CacheKey, tuple[int, ...], int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, key: CacheKey, tiers: tuple[int, ...], nbytes: int) -> bool:
        """Queue an entry; False if it does not fit: the caller then writes it itself."""
        with self._changed:
            if self._closed or self._bytes + nbytes > self._max_bytes:
                return False
            self._queue.append((key, tiers, nbytes))
            self._bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcomm-write-behind", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, deadline: Deadline) -> None:
        """Wait until all that is queued is written. Raises DeadlineExceeded."""
        with self._changed:
            while self._bytes:
                if not self._changed.wait(deadline.left()) and not deadline.left():
                    raise deadline.error(f"writing {self._bytes} bytes to lower tiers")

    def close(self) -> None:
        """Stop once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                key, tiers, nbytes = self._queue.popleft()
            try:
                self._write(key, tiers)
            finally:
                with self._changed:
                    self._bytes -= nbytes
                    self._changed.notify_all()
