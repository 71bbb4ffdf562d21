"""Whether a shared store is worth asking now: after one silence nobody waits again until the service was heard of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcomm.errors import Overloaded, StoreUnavailable

_FIRST_S, _LONGEST_S = 1.0, 30.0


class Guard:
    """Shut by the first fault of reaching the service, opened by news from it and not before a pause is over.

    The pause is a second, twice as long each further time without a success in between, up to 30. So a service that is
    silent costs one wait in all; one that says it lives and does not answer costs one wait a pause.

    Args:
        watched: whether ``alive`` will ever be called; a guard of a store that nobody follows stays open.
    """

    def __init__(self, watched: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._watched, self._clock = watched, clock
        self._lock = threading.Lock()
        self._shut = False
        self._pause_s, self._until = _FIRST_S, 0.0

    @property
    def open(self) -> bool:
        """Whether to ask."""
        return not self._shut

    def failed(self, error: Exception) -> None:
        """A call failed; only not being reached shuts the guard, a refusal is an answer."""
        if not self._watched or not isinstance(error, StoreUnavailable) or isinstance(error, Overloaded):
            return
        with self._lock:
            if not self._shut:
                self._shut, self._until = True, self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_S)

    def succeeded(self) -> None:
        """A call came back."""
        with self._lock:
            self._pause_s = _FIRST_S

    def alive(self) -> None:
        """The service was heard of by whoever follows it."""
        with self._lock:
            if self._clock() >= self._until:
                self._shut = False
