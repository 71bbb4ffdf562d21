"""Where a book's learned offsets outlive it: in a blob of a private store, or among the sums of many nodes."""

from __future__ import annotations

import logging
from typing import Protocol

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.saved import Learned, add_to, forget_in, load_from, restore
from kvcomm.anchors.shared_sums import SharedSums
from kvcomm.errors import StoreError
from kvcomm.store.base import Store
from kvcomm.store.coordinator import Coordinator
from kvcomm.types import ModelFingerprint, Namespace

log = logging.getLogger(__name__)


class Saving(Protocol):
    """A book, and where it is saved."""

    book: OffsetBook

    def save(self) -> None:
        """Save what was learned since the last time. Raises StoreError; it is kept for the next time then."""
        ...

    def forget(self, agent: str) -> None:
        """Drop what was saved of an agent's labels. Raises StoreError."""
        ...


def saving(store: Store, namespace: Namespace, fingerprint: ModelFingerprint, learn: bool, ask: bool) -> Saving:
    """A book that goes on from what is saved, and its saving: ``store.coordinator`` decides of which kind.

    Args:
        learn: whether the book will learn; one that does not takes no place among the nodes, and fetches once.
        ask: whether to ask for what is saved now; with False a book that learns gets it when it is first saved.
    """
    if store.coordinator is None:
        return SavedBlob(store, namespace, fingerprint)
    kind = SavedSums if learn else FetchedSums
    return kind(store.coordinator, namespace, fingerprint, ask)


class SavedBlob:
    """Offsets as one blob beside the entries of a store, to which each process adds under the store's lock."""

    def __init__(self, store: Store, namespace: Namespace, fingerprint: ModelFingerprint) -> None:
        self._store, self._namespace = store, namespace
        self.book = OffsetBook(fingerprint, learned=load_from(store, namespace, fingerprint))

    def save(self) -> None:
        """Add what is new."""
        fresh = self.book.take_fresh()
        if fresh is not None:
            try:
                add_to(self._store, self._namespace, self.book.fingerprint, fresh)
            except StoreError:
                self.book.put_back(fresh)
                raise

    def forget(self, agent: str) -> None:
        """Drop an agent's labels from the blob."""
        forget_in(self._store, self._namespace, self.book.fingerprint, lambda label: label.partition("/")[0] == agent)


class SavedSums:
    """Offsets as one node's share of what all nodes learned (kvcomm.anchors.shared_sums)."""

    def __init__(self, where: Coordinator, namespace: Namespace, fingerprint: ModelFingerprint, ask: bool) -> None:
        self._where, self._namespace = where, namespace
        self.book = OffsetBook(fingerprint, learned=Learned.empty(fingerprint))
        self._shared = SharedSums(self.book, where.sums(namespace, fingerprint), where.node)
        if ask:
            try:
                self._shared.sync()
            except StoreError as error:
                log.warning("learned offsets could not be fetched, beginning without: %s", error)

    def save(self) -> None:
        """Send what is new here, and go on with what is new elsewhere."""
        self._shared.sync()

    def forget(self, agent: str) -> None:
        """Drop an agent's labels at all nodes; the token needs the right ``admin``."""
        self._where.forget_sums(self._namespace, self.book.fingerprint, agent)


class FetchedSums:
    """Offsets of all nodes, fetched once, in a book that learns nothing; a token that only reads is enough."""

    def __init__(self, where: Coordinator, namespace: Namespace, fingerprint: ModelFingerprint, ask: bool) -> None:
        self._where, self._namespace = where, namespace
        learned = Learned.empty(fingerprint)
        try:
            found = where.sums(namespace, fingerprint).others("", 0, "") if ask else None
            if found is not None and found.data is not None:
                learned = restore(found.data, fingerprint)
        except StoreError as error:
            log.warning("learned offsets could not be fetched, going on without: %s", error)
        self.book = OffsetBook(fingerprint, learned=learned)

    def save(self) -> None:
        """Nothing was learned."""

    def forget(self, agent: str) -> None:
        """Drop an agent's labels at all nodes; the token needs the right ``admin``."""
        self._where.forget_sums(self._namespace, self.book.fingerprint, agent)
