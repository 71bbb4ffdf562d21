"""Puts into a shared store beside the calls: one thread, a queue bounded by bytes, and nobody waits but ``flush``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvcomm.keys import CacheKey
from kvcomm.store.base import Deadline, Entry

MAX_BYTES = 1 << 30


class Sender:
    """A queue of entries and the thread that puts them, made when first needed.

    Args:
        put: puts one; it raises nothing.
        max_bytes: of KV that waits; the tensors are the pool's, not copies.
    """

    def __init__(self, put: Callable[[CacheKey, Entry], None], max_bytes: int = MAX_BYTES) -> None:
        self._put, self._max_bytes = put, max_bytes
        self._queue: deque[tuple[CacheKey, Entry]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, key: CacheKey, entry: Entry) -> bool:
        """Queue an entry; False if it does not fit."""
        with self._changed:
            if self._bytes + entry.kv.nbytes > self._max_bytes:
                return False
            self._queue.append((key, entry))
            self._bytes += entry.kv.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def flush(self, deadline: Deadline) -> None:
        """Wait until all that was queued was put, or failed. Raises DeadlineExceeded."""
        with self._changed:
            while self._bytes:
                if not deadline.left():
                    raise deadline.error(f"putting {self._bytes} bytes that wait for the store")
                self._changed.wait(deadline.left())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if not self._changed.wait(5.0) and not self._queue:
                        self._thread = None
                        return
                key, entry = self._queue.popleft()
            try:
                self._put(key, entry)
            finally:
                with self._changed:
                    self._bytes -= entry.kv.nbytes
                    self._changed.notify_all()
