"""Being told what others drop: one thread and one connection for each namespace that is watched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcomm.errors import KVCommError
from kvcomm.store.base import MAX_GROUP_CHARS, Deadline
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.schema import Members
from kvcomm.types import Namespace

log = logging.getLogger(__name__)
SILENCE_S = 30.0
CONNECT_S = 5.0
_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
OnDrop = Callable[[Namespace, str], None]


class Watches:
    """The threads that watch; none if nobody wants to know."""

    def __init__(self, on_drop: Sequence[OnDrop]) -> None:
        self._on_drop = tuple(on_drop)
        self._watching: list[Watch] = []

    def add(self, client: Client) -> None:
        """Watch a client's namespace."""
        if self._on_drop:
            self._watching.append(Watch(client, self._on_drop))

    def close(self) -> None:
        """End all; does not wait for a callback that runs."""
        for watch in self._watching:
            watch.close()


class Watch:
    """Calls ``on_drop`` for each drop, once, in order, also for those that happened while the service was away."""

    def __init__(self, client: Client, on_drop: Sequence[OnDrop]) -> None:
        self._client, self._on_drop = client, on_drop
        self._namespace = Namespace(client.namespace)
        self._version = -1
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.wire.close()

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not self._closed.is_set():
            before = self._version
            try:
                self._listen()
            except KVCommError as error:
                log.debug("watching %s ended: %s", self._namespace, error)
            pause_s = _PAUSE_S if self._version != before else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closed.wait(pause_s)

    def _listen(self) -> None:
        connection = self._client.take(Deadline(CONNECT_S), fresh=True)
        self._connection = connection
        try:
            number = connection.send({"call": "watch", "since": self._version}, Deadline(CONNECT_S))
            while not self._closed.is_set():
                preamble, found = connection.next(number, Deadline(SILENCE_S))
                if preamble.kind is not Kind.NOTICE or preamble.payload_bytes:
                    return
                self._take_in(Members(found, "notice"))
        finally:
            self._connection = None
            connection.broken = True
            self._client.give(connection)

    def _take_in(self, notice: Members) -> None:
        version, groups = notice.integer("version", 0, 2**53), notice.texts("groups", MAX_GROUP_CHARS, 64)
        notice.end()
        for group in groups:
            for call in self._on_drop:
                with suppress(Exception):
                    call(self._namespace, group)
        self._version = version
