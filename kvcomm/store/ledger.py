"""The in-memory account of a tier: who holds what, in order of use. Not thread-safe; the tier holds its lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import islice

from kvcomm.store.base import Priority
from kvcomm.store.eviction import Candidate, Usage


class Ledger:
    """Candidates by (namespace, priority), least recently used first, and the usage of each namespace."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], OrderedDict[str, Candidate]] = {}
        self.usage: dict[str, Usage] = {}

    def add(self, candidate: Candidate) -> None:
        """Count a new entry in."""
        self._classes.setdefault((candidate.namespace, candidate.priority), OrderedDict())[candidate.name] = candidate
        self.charge(candidate.namespace, candidate.nbytes, 1)

    def remove(self, namespace: str, priority: int, name: str) -> None:
        """Count an entry out."""
        queue = self._classes[namespace, priority]
        candidate = queue.pop(name)
        if not queue:
            del self._classes[namespace, priority]
        self.charge(namespace, -candidate.nbytes, -1)

    def charge(self, namespace: str, nbytes: int, entries: int) -> None:
        """Change a namespace's usage, for instance by a reservation; an empty namespace is forgotten."""
        used = self.usage.get(namespace, Usage()).plus(nbytes, entries)
        if used.entries or used.nbytes:
            self.usage[namespace] = used
        else:
            self.usage.pop(namespace, None)

    def use(self, namespace: str, priority: int, name: str, now_s: float) -> None:
        """Count a use: last in line now."""
        queue = self._classes[namespace, priority]
        old = queue[name]
        queue[name] = Candidate(name, namespace, priority, old.nbytes, old.created_s, now_s, old.uses + 1)
        queue.move_to_end(name)

    def oldest(self, namespaces: Collection[str], depth: int) -> Iterator[list[Candidate]]:
        """For each priority class, lowest first: the ``depth`` least recently used entries of each namespace."""
        for priority in Priority:
            found = [self._classes.get((namespace, int(priority))) for namespace in namespaces]
            yield [candidate for queue in found if queue for candidate in islice(queue.values(), depth)]
