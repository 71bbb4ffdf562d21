"""What was put, deleted and dropped lately, in order, for those who follow a namespace. In memory alone, and bounded.

Who falls behind, or was away too long, or knew another run of the service, is told to list again. That costs a listing
and is never wrong, so nothing of this needs to survive.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque

from kvcomm.store.base import Deadline
from kvcomm.transfer.news import News

KEPT = 4096
MAX_NAMESPACES = 1024


class _Kept:
    def __init__(self, version: int) -> None:
        self.version = version  # of the last one
        self.kept: deque[News] = deque(maxlen=KEPT)


class Changes:
    """Changes of all namespaces, the last 4,096 of each. Safe to use from several threads.

    Attributes:
        run: names this run of the service; versions of another one mean nothing.
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self._news: dict[str, _Kept] = {}
        self._first = 0  # version at which a namespace begins that is not known (any more)
        self._changed = threading.Condition()
        self._closed = False

    def add(self, namespace: str, change: News) -> None:
        """Write a change down and wake those who follow."""
        with self._changed:
            news = self._news.get(namespace)
            if news is None:
                if len(self._news) >= MAX_NAMESPACES:  # the one that was quiet longest; its followers list again
                    quiet = self._news.pop(next(iter(self._news)))
                    self._first = max(self._first, quiet.version + 1)
                news = _Kept(self._first)
            else:
                del self._news[namespace]
            self._news[namespace] = news  # the last to be forgotten
            news.version += 1
            news.kept.append(change)
            self._changed.notify_all()

    def last(self, namespace: str) -> int:
        """Version of the last change."""
        with self._changed:
            return self._last(namespace)

    def since(self, namespace: str, version: int) -> tuple[int, list[News]] | None:
        """(version, changes) after ``version``; None where they are not all known any more."""
        with self._changed:
            news, last = self._news.get(namespace), self._last(namespace)
            missed = last - version
            if missed == 0:
                return last, []
            if news is None or missed < 0 or missed > len(news.kept):
                return None
            return last, list(news.kept)[-missed:]

    def wait(self, namespace: str, version: int, deadline: Deadline) -> None:
        """Wait for a change after ``version``, at most until the deadline."""
        with self._changed:
            while not self._closed and deadline.left() and self._last(namespace) == version:
                self._changed.wait(deadline.left())

    def close(self) -> None:
        """Let those who wait return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _last(self, namespace: str) -> int:
        news = self._news.get(namespace)
        return self._first if news is None else news.version
