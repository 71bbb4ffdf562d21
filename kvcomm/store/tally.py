"""Counters of events by namespace; never content."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Thread-safe counts. Reads and writes are short, so there is no deadline."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def add(self, namespace: str, event: str, count: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._counts.setdefault(namespace, Counter())[event] += count

    def read(self, namespace: str | None = None) -> dict[str, int]:
        """The counts of one namespace, or of all together."""
        with self._lock:
            if namespace is not None:
                return dict(self._counts.get(namespace, {}))
            total: Counter[str] = Counter()
            for counts in self._counts.values():
                total.update(counts)
            return dict(total)
