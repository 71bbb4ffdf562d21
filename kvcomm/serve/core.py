"""What all connections share: the store, values on their way, claims, drops, and the hooks that count and log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcomm.keys import CacheKey
from kvcomm.serve.admission import Admission
from kvcomm.serve.changes import Changes
from kvcomm.serve.claims import Claims
from kvcomm.serve.drops import Drops
from kvcomm.serve.learned import LearnedSums
from kvcomm.serve.neighbours import Neighbours
from kvcomm.serve.uploads import Uploads
from kvcomm.store.base import Entry, Store
from kvcomm.transfer.auth import Grant
from kvcomm.transfer.news import News
from kvcomm.types import Namespace

Authenticate = Callable[[bytes], Grant]


@dataclass(frozen=True, slots=True)
class Done:
    """One call, as counters and logs see it; never content.

    Attributes:
        call: name of the call, one of a fixed list.
        outcome: ``ok``, ``miss``, or the code of a refusal.
        seconds: from the arrival of its header to the end of its answer.
        received, sent: payload bytes and all else, on the wire.
    """

    call: str
    namespace: str
    outcome: str
    seconds: float
    received: int
    sent: int


@dataclass
class Core:
    """Parts of one service.

    Attributes:
        authenticate: a token's bytes to what it may do; raises AccessDenied.
        holds: whether a grant still holds; asked before each call.
        on_done: called after each call, from many threads.
        on_denied: called with (token's id, namespace, call) when access is refused.
        on_admin: called with (act, grant, facts) for each administrative act.
    """

    store: Store
    authenticate: Authenticate
    uploads: Uploads
    drops: Drops
    learned: LearnedSums
    claims: Claims = field(default_factory=Claims)
    admission: Admission = field(default_factory=Admission)
    changes: Changes = field(default_factory=Changes)
    neighbours: Neighbours = field(default_factory=Neighbours)
    holds: Callable[[Grant], bool] = lambda grant: True
    on_done: Callable[[Done], None] = lambda done: None
    on_denied: Callable[[str, str, str], None] = lambda who, namespace, call: None
    on_admin: Callable[[str, Grant, dict[str, str | int]], None] = lambda act, grant, facts: None

    def added(self, key: CacheKey, entry: Entry) -> None:
        """An entry was stored: it can be found by its likeness, and those who follow are told."""
        self.neighbours.add(key, entry.segment)
        self.changes.add(key.namespace.name, News("added", key, entry.attributes.group))

    def removed(self, key: CacheKey) -> None:
        """An entry was deleted, also if it was not there: a follower may hold what was evicted here."""
        self.neighbours.remove(key)
        self.changes.add(key.namespace.name, News("removed", key, ""))

    def dropped(self, namespace: Namespace, group: str) -> int:
        """A group was dropped, or with the empty one everything; the drop's version. Raises StoreUnavailable."""
        if not group:
            self.neighbours.delete_namespace(namespace)
        self.changes.add(namespace.name, News("dropped", None, group))
        return self.drops.add(namespace.name, group)
