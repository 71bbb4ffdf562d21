"""Two small locks: one flight for each name, and a gate that many pass together or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcomm.store.base import Deadline


class SingleFlight:
    """Lets one thread at a time work on a name; the others wait, and are told that they waited."""

    def __init__(self) -> None:
        self._flying: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    @contextmanager
    def flight(self, name: str, deadline: Deadline) -> Iterator[bool]:
        """Yields True to the one that flies. To one that waited for another's end it yields False, without the name.

        Raises:
            DeadlineExceeded: the other took longer.
        """
        with self._lock:
            other = self._flying.get(name)
            mine = threading.Event()
            if other is None:
                self._flying[name] = mine
        if other is not None:
            if not other.wait(deadline.left()):
                raise deadline.error(f"waiting for another thread's work on {name[:16]}")
            yield False
            return
        try:
            yield True
        finally:
            with self._lock:
                del self._flying[name]
            mine.set()


class Gate:
    """``shared`` by all that add entries; ``alone`` by what must see none of them half done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False

    @contextmanager
    def shared(self, deadline: Deadline) -> Iterator[None]:
        """Pass unless someone is alone inside. Not to be nested."""
        self._enter(deadline, alone=False)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, deadline: Deadline) -> Iterator[None]:
        """Wait until nobody is inside, and keep all out."""
        self._enter(deadline, alone=True)
        try:
            with self._changed:
                while self._inside:
                    if not self._changed.wait(deadline.left()) and not deadline.left():
                        raise deadline.error("waiting for puts to end")
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _enter(self, deadline: Deadline, alone: bool) -> None:
        with self._changed:
            while self._alone:
                if not self._changed.wait(deadline.left()) and not deadline.left():
                    raise deadline.error("waiting for a deletion to end")
            if alone:
                self._alone = True
            else:
                self._inside += 1
