"""Following a namespace: one thread and one connection that hear what others put, delete and drop, as it happens."""

from __future__ import annotations

import logging
import random
import threading
from contextlib import suppress

from kvcomm.errors import KVCommError, ProtocolError
from kvcomm.store.base import Deadline
from kvcomm.store.coordinator import Follower
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.names import fingerprint_text, read_listings
from kvcomm.transfer.news import read_changes
from kvcomm.transfer.schema import Members
from kvcomm.types import ModelFingerprint, Namespace

log = logging.getLogger(__name__)
SILENCE_S = 6.0
CONNECT_S = 5.0
LIST_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Follow:
    """Tells ``follower`` what changes, in order, from a listing of everything on; again from one after news were lost.

    Cheap: a listing at the start, then a frame of about 0.7 KB for each entry that anybody puts, and one of 150 bytes
    each two seconds.
    """

    def __init__(self, client: Client, fingerprint: ModelFingerprint, follower: Follower) -> None:
        self._client, self._fingerprint, self._follower = client, fingerprint, follower
        self._namespace = Namespace(client.namespace)
        self._run, self._version, self._listed = "", 0, False
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._loop, name="follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; does not wait for what the follower is being told."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.wire.close()

    def _loop(self) -> None:
        pause_s = _PAUSE_S
        while not self._closed.is_set():
            before = self._run, self._version
            try:
                self._listen()
            except KVCommError as error:
                log.debug("following %s ended: %s", self._namespace, error)
            except Exception:  # of the follower's own; the next listing puts it right
                log.exception("following %s failed", self._namespace)
                self._listed = False
            moved = (self._run, self._version) != before
            pause_s = _PAUSE_S if moved else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))

    def _listen(self) -> None:
        connection = self._client.take(Deadline(CONNECT_S), fresh=True)
        self._connection = connection
        try:
            request = {
                "call": "follow", "fingerprint": fingerprint_text(self._fingerprint),
                "run": self._run if self._listed else "", "since": self._version,
            }  # fmt: skip
            number = connection.send(request, Deadline(CONNECT_S))
            while not self._closed.is_set():
                deadline = Deadline(SILENCE_S)
                preamble, found = connection.next(number, deadline)
                if preamble.kind is not Kind.NOTICE:
                    return
                page = connection.wire.payload(preamble, deadline)
                self._take_in(Members(found, "notice"), page)
        finally:
            self._connection = None
            connection.broken = True
            self._client.give(connection)

    def _take_in(self, notice: Members, page: bytearray) -> None:
        run, version = notice.text("run", 16), notice.integer("version", 0, 2**53)
        whole, more = notice.truth("whole"), notice.truth("more")
        notice.end()
        self._client.breaker.succeeded()
        if not whole:
            self._list()
        elif not self._listed:
            raise ProtocolError("news came before a listing; the connection is closed")
        for news in read_changes(page, self._namespace):
            if news.key is None:
                self._follower.dropped(news.group)
            elif news.what == "added":
                self._follower.added(news.key, news.group)
            else:
                self._follower.removed(news.key)
        if not more:
            self._run, self._version = run, version
        self._follower.alive()

    def _list(self) -> None:
        request = {"call": "entries", "chosen": True, "fingerprint": fingerprint_text(self._fingerprint)}
        answer = self._client.call(request, Deadline(LIST_S))
        self._follower.listed(read_listings(bytes(answer.payload), self._namespace, answer.header.number("now_s")))
        self._listed = True


class Follows:
    """All that one store follows."""

    def __init__(self) -> None:
        self._held: list[Follow] = []

    def add(self, follow: Follow) -> None:
        """Close it with the store."""
        self._held.append(follow)

    def close(self) -> None:
        """End all."""
        for follow in self._held:
            with suppress(Exception):
                follow.close()
        self._held.clear()
