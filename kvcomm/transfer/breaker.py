"""A circuit breaker: after some failures in a row nobody waits for the service again until a pause is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcomm.errors import StoreUnavailable


class Breaker:
    """Opens after ``limit`` failures in a row, for ``pause_s``, twice as long each further time up to ``longest_s``.

    After a pause one caller may try; the others go on failing at once until it succeeded.
    """

    def __init__(
        self, limit: int = 3, pause_s: float = 0.5, longest_s: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._first_s, self._longest_s, self._clock = limit, pause_s, longest_s, clock
        self._failures = 0
        self._pause_s = pause_s
        self._closed_at = 0.0  # when the next one may try
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether calls fail at once."""
        return self._failures >= self._limit

    def check(self) -> None:
        """Raise StoreUnavailable while it is open; after the pause, let one caller through."""
        with self._lock:
            if self._failures < self._limit:
                return
            left = self._closed_at - self._clock()
            if left > 0:
                raise StoreUnavailable(
                    f"the service failed {self._failures} times in a row; it is tried again in {left:.1f} s"
                )
            self._closed_at = self._clock() + self._pause_s  # the others wait for this one

    def succeeded(self) -> None:
        """The service answered, a refusal included."""
        with self._lock:
            self._failures, self._pause_s = 0, self._first_s

    def failed(self) -> None:
        """The service did not answer."""
        with self._lock:
            self._failures += 1
            if self._failures > self._limit:
                self._pause_s = min(2 * self._pause_s, self._longest_s)
            self._closed_at = self._clock() + self._pause_s
