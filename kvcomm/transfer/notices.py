"""A connection of notices, opened again whenever it ends: what following and watching a namespace share."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping

from kvcomm.errors import KVCommError
from kvcomm.store.base import Deadline
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.schema import Members

log = logging.getLogger(__name__)
CONNECT_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Notices:
    """One thread that asks, takes in what comes, and asks again after a pause when the connection ended.

    The pause is 0.1 s after a connection that told something new, else twice the last one, up to 5 s; partly random, so
    that those who lost one service do not come back together.

    Args:
        name: the thread's, and the word for it in logs.
        ask: the request, made anew for each connection.
        take_in: told of each notice's header and payload; whether that was something new. What it raises ends the
            connection.
        silence_s: the connection is given up when nothing came for so long.
    """

    def __init__(
        self, client: Client, name: str, ask: Callable[[], Mapping[str, object]],
        take_in: Callable[[Members, bytearray], bool], silence_s: float,
    ) -> None:  # fmt: skip
        self._client, self._name, self._silence_s = client, name, silence_s
        self._ask, self._take_in = ask, take_in
        self._news = False
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; does not wait for a notice that is being taken in."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.wire.close()

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not self._closed.is_set():
            self._news = False
            try:
                self._listen()
            except KVCommError as error:
                log.debug("%s of %s ended: %s", self._name, self._client.namespace, error)
            except Exception:
                log.exception("%s of %s failed", self._name, self._client.namespace)
            pause_s = _PAUSE_S if self._news else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))

    def _listen(self) -> None:
        connection = self._client.take(Deadline(CONNECT_S), fresh=True)
        self._connection = connection
        try:
            number = connection.send(self._ask(), Deadline(CONNECT_S))
            while not self._closed.is_set():
                deadline = Deadline(self._silence_s)
                preamble, found = connection.next(number, deadline)
                if preamble.kind is not Kind.NOTICE:
                    return
                page = connection.wire.payload(preamble, deadline)
                self._news |= self._take_in(Members(found, "notice"), page)
        finally:
            self._connection = None
            connection.broken = True
            self._client.give(connection)
