"""A node's share of what all nodes learned: its own sums go out, the others' come in, and neither is sent back.

A node keeps the sums of its own calls apart from those it fetched. It sends its own, all of them each time, marked with
(epoch, sequence), of which the service keeps the highest: a snapshot that comes twice or late changes nothing. It gets
the sum over the other nodes. So each observation counts once, whatever is lost, repeated or reordered on the way.
"""

from __future__ import annotations

import logging
import threading

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.saved import Learned, dump, restore
from kvcomm.errors import StoreError, Superseded
from kvcomm.store.sums import SumsService

log = logging.getLogger(__name__)


class SharedSums:
    """Keeps a book in step with the other nodes' books. ``sync`` may be called from any thread, and at any time.

    Only this object may take the book's fresh sums: not together with a store that saves them too.

    Args:
        book: made with ``learned=``, so that it holds what it learns apart.
        node: name of this node, the same after a restart, used by one process at a time.
        limit: bytes of a snapshot that are read from the service.
    """

    def __init__(self, book: OffsetBook, service: SumsService, node: str, limit: int = 1 << 30) -> None:
        self.book, self.node = book, node
        self._service, self._limit = service, limit
        self._lock = threading.Lock()
        self._own = Learned.empty(book.fingerprint)
        self._unsure: Learned | None = None  # of _own, what was sent and not answered
        self._unsure_from = 0  # sequence at which that began
        self._epoch = self._sequence = 0
        self._current = False
        self._known = ""

    def sync(self) -> bool:
        """Send what was learned here, fetch what others learned, and let the book go on from both.

        Returns:
            whether the book has something new from elsewhere.

        Raises:
            StoreError: the service could not be reached or refused; what was learned here is kept for the next time.
        """
        with self._lock:
            try:
                return self._exchange()
            except Superseded as error:
                log.info("node %s begins a new epoch: %s", self.node, error)
                self._current = False
                return self._exchange()

    def _exchange(self) -> bool:
        if not self._current:
            self._open()
        self._send()
        return self._fetch()

    def _open(self) -> None:
        """Go on from what the service keeps of this node: its copy counts, so what was forgotten there stays so.

        What was sent without an answer is added again only if it surely was not kept: lost is better than twice.
        """
        opened = self._service.open(self.node)
        own = Learned.empty(self.book.fingerprint) if opened.data is None else self._read(opened.data)
        if self._unsure is not None and opened.kept[0] == self._epoch and opened.kept[1] < self._unsure_from:
            self.book.put_back(self._unsure)
        self._own, self._unsure, self._known = own, None, ""
        self._epoch, self._sequence, self._current = opened.epoch, 0, True

    def _send(self) -> None:
        fresh = self.book.take_fresh()
        if fresh is None and self._unsure is None:
            return
        self._sequence += 1  # before sending: a number whose answer was lost is not used for other sums
        if self._unsure is None:
            self._unsure, self._unsure_from = Learned.empty(self.book.fingerprint), self._sequence
        before = None if self._unsure_from == self._sequence else self._unsure
        if fresh is not None:
            self._own.merge(fresh)
        try:
            self._service.put(self.node, self._epoch, self._sequence, dump(self._own))
        except Superseded:
            self._unsure = before  # this one was not kept, and the book has it back
            if fresh is not None:
                self.book.put_back(fresh)
            raise
        except BaseException:
            if fresh is not None:
                self._unsure.merge(fresh)
            raise
        self._unsure = None

    def _fetch(self) -> bool:
        found = self._service.others(self.node, self._epoch, self._known)
        if found.data is None:
            return False
        total = self._read(found.data)
        total.merge(self._own)
        self.book.replace(total)
        self._known = found.version
        return True

    def _read(self, data: bytes) -> Learned:
        if len(data) > self._limit:
            raise StoreError(f"sums of {len(data)} bytes exceed {self._limit}; raise limit if the model is that large")
        return restore(data, self.book.fingerprint)
