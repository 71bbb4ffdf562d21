"""Connections to one service in one namespace: kept, used again, tried again when they break, never past a deadline."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvcomm.errors import AccessDenied, DeadlineExceeded, KVCommError, Overloaded, ProtocolError, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.address import Address
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.frame import Kind, Preamble, pack
from kvcomm.transfer.refusal import refused
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire

T = TypeVar("T")
TRIES = 3
MAX_IDLE = 8
MAX_ANSWER_BYTES = 1 << 30
_FIRST_PAUSE_S = 0.01


@dataclass
class Answer:
    """Header of the last frame, and the payloads of all frames of an answer."""

    header: Members
    payload: bytearray


class Connection:
    """One connection after its hello. One thread at a time uses it.

    Attributes:
        broken: an answer was lost half-way, so nothing more can be asked.
        used: how many calls it has served.
    """

    def __init__(self, wire: Wire, token: str, namespace: str, deadline: Deadline) -> None:
        self.wire = wire
        self.broken = False
        self.used = 0
        self._number = 0
        self._untold: set[int] = set()
        found = self.ask({"call": "hello", "token": token}, deadline).header
        granted = found.text("namespace", 128)
        if granted != namespace:
            raise AccessDenied(f"the token is for namespace {granted}, not {namespace}; use a token of {namespace}")

    def ask(
        self, header: Mapping[str, object], deadline: Deadline, payload: Sequence[memoryview] = (), *,
        checked: bool = True,
    ) -> Answer:  # fmt: skip
        """Send a request and receive its whole answer.

        Raises:
            KVCommError: what the service refused with, or why there is no answer; then it is ``broken``.
        """
        return self.answer(self.send(header, deadline, payload, checked=checked), deadline)

    def answer(self, number: int, deadline: Deadline) -> Answer:
        """The whole answer to request ``number``, those before it having been received. Raises as ``ask``."""
        pages = bytearray()
        while True:
            preamble, found = self.next(number, deadline)
            with self.breaking():
                if preamble.payload_bytes:
                    if len(pages) + preamble.payload_bytes > MAX_ANSWER_BYTES:
                        raise ProtocolError(f"an answer exceeds {MAX_ANSWER_BYTES} bytes; the connection is closed")
                    pages += self.wire.payload(preamble, deadline)
            if preamble.kind is Kind.ANSWER:
                self.used += 1
                return Answer(Members(found, "answer"), pages)

    def send(
        self, header: Mapping[str, object], deadline: Deadline, payload: Sequence[memoryview] = (), *,
        checked: bool = True,
    ) -> int:  # fmt: skip
        """Send a request; its number. Answers come in the order of the requests."""
        self._number += 1
        with self.breaking():
            self.wire.send(Kind.REQUEST, self._number, header, deadline, payload, checked=checked, waits=True)
        return self._number

    def stream(
        self, header: Mapping[str, object], deadline: Deadline, pieces: Iterable[Sequence[memoryview]], nbytes: int
    ) -> int:
        """Send a request whose payload of ``nbytes``, which carries its own checks, is made while it is sent."""
        self._number += 1
        with self.breaking():
            left_ms = max(1, int(deadline.left() * 1000))
            head = pack(Kind.REQUEST, self._number, header, deadline_ms=left_ms, payload_bytes=nbytes)
            self.wire.send_all([memoryview(head)], deadline)
            for piece in pieces:
                self.wire.send_all(piece, deadline)
        return self._number

    def tell(self, header: Mapping[str, object], deadline: Deadline) -> None:
        """Send a request whose answer nobody needs; it is read past when it comes."""
        self._untold.add(self.send(header, deadline))

    def next(self, number: int, deadline: Deadline) -> tuple[Preamble, dict[str, object]]:
        """The next frame of the answer to request ``number``; its payload is the caller's to receive.

        Raises:
            KVCommError: the service refused, or the connection failed.
        """
        with self.breaking():
            preamble, found = self.wire.receive(deadline)
            while preamble.number in self._untold and not preamble.payload_bytes:
                self._untold.discard(preamble.number)
                preamble, found = self.wire.receive(deadline)
            if preamble.kind is Kind.REFUSAL and preamble.number in (0, number) and not preamble.payload_bytes:
                error = refused(found)
                self.broken = preamble.number == 0  # said of the connection, not of the request
            elif preamble.number != number or preamble.kind not in (Kind.ANSWER, Kind.PART, Kind.NOTICE):
                raise ProtocolError(f"a {preamble.kind.name} for request {preamble.number} came instead of {number}")
            else:
                return preamble, found
        raise error

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """What fails inside leaves the connection ``broken``."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise


class Client:
    """Calls to a service in one namespace. Safe to use from several threads; each call has a connection for itself."""

    def __init__(
        self, address: Address, namespace: str, token: str, *, tls: ssl.SSLContext | None = None,
        breaker: Breaker | None = None,
    ) -> None:  # fmt: skip
        self.address, self.namespace = address, namespace
        self._token, self._tls = token, tls
        self.breaker = breaker or Breaker()
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self.sent = self.received = 0

    def call(
        self, header: Mapping[str, object], deadline: Deadline, payload: Sequence[memoryview] = (), *,
        checked: bool = True,
    ) -> Answer:  # fmt: skip
        """Ask, on a connection of the pool; see ``run`` for what is tried again."""
        return self.run(lambda connection: connection.ask(header, deadline, payload, checked=checked), deadline)

    def run(
        self, work: Callable[[Connection], T], deadline: Deadline, *, keeps: Callable[[T], bool] = lambda result: False
    ) -> T:
        """``work`` with a connection, again with another if that one breaks, at most three times before the deadline.

        ``work`` must bear being done twice, as every call of the protocol does.

        Args:
            keeps: whether a result goes on using the connection, and gives it back itself.

        Raises:
            KVCommError: what the service refused with; StoreUnavailable if it does not answer.
        """
        pause_s = _FIRST_PAUSE_S
        for attempt in range(TRIES):
            self.breaker.check()
            fresh = attempt > 0
            connection: Connection | None = None
            try:
                connection = self.take(deadline, fresh=fresh)
                result = work(connection)
            except KVCommError as error:
                stale = connection is not None and connection.broken and connection.used > 0 and not fresh
                stale = stale and not isinstance(error, DeadlineExceeded)
                self._judge(connection, error, stale)
                if connection is not None:
                    self.give(connection)
                again = isinstance(error, Overloaded) or connection is None or connection.broken
                if not (again and isinstance(error, StoreUnavailable)) or attempt == TRIES - 1:
                    raise
                pause_s = 0.0 if stale else pause_s * (1 + random.random())
                if deadline.left() <= pause_s:
                    raise
            except BaseException:
                if connection is not None:
                    connection.broken = True
                    self.give(connection)
                raise
            else:
                self.breaker.succeeded()
                if not keeps(result):
                    self.give(connection)
                return result
            time.sleep(pause_s)
            pause_s = max(pause_s, _FIRST_PAUSE_S) * 2
        raise StoreUnavailable(f"{self.address} did not answer in {TRIES} tries")  # not reached

    def take(self, deadline: Deadline, *, fresh: bool = False) -> Connection:
        """A connection, the caller's until ``give``.

        Args:
            fresh: a new one, and those that wait in the pool are closed: the service was most likely started anew.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"the store at {self.address} is closed; open a new one")
            idle, self._idle = self._idle, []
            if not fresh and idle:
                connection = idle.pop()
                self._idle = idle
                return connection
        for connection in idle:
            connection.wire.close()
        wire = self.address.connect(deadline, self._tls)
        try:
            return Connection(wire, self._token, self.namespace, deadline)
        except BaseException:
            wire.close()
            raise

    def give(self, connection: Connection) -> None:
        """Give a connection back; a broken one is closed."""
        with self._lock:
            self.sent += connection.wire.sent
            self.received += connection.wire.received
            connection.wire.sent = connection.wire.received = 0
            if not (connection.broken or self._closed or len(self._idle) >= MAX_IDLE):
                self._idle.append(connection)
                return
        connection.wire.close()

    def close(self) -> None:
        """Close what waits in the pool; connections in use are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.wire.close()

    def _judge(self, connection: Connection | None, error: KVCommError, stale: bool) -> None:
        """A refusal is an answer; a lost connection, or none, is a failure; a stale one of the pool is neither."""
        if isinstance(error, Overloaded | AccessDenied) or (connection is not None and not connection.broken):
            self.breaker.succeeded()
        elif not stale and not self._closed:
            self.breaker.failed()
