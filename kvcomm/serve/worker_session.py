"""One connection to a worker: hello with a token, then request after request, each answered or refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.serve.core import Authenticate
from kvcomm.serve.worker import Worker
from kvcomm.store.base import Deadline
from kvcomm.transfer.auth import READ, Grant
from kvcomm.transfer.frame import Kind, Preamble
from kvcomm.transfer.refusal import refusal
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire

log = logging.getLogger(__name__)
HELLO_S = 5.0
FRAME_S = 30.0
IDLE_S = 300.0
MAX_TOKEN_CHARS = 512
DEFAULT_DEADLINE_MS = 120_000


@dataclass
class Ask:
    """A request as a worker's function gets it; it reads all of ``asked``, takes the payload, and answers once."""

    wire: Wire
    preamble: Preamble
    asked: Members
    deadline: Deadline
    taken: bool = False

    @property
    def number(self) -> int:
        """Of the request; what answers it carries the same."""
        return self.preamble.number

    def payload(self) -> bytearray:
        """Receive the payload, checked."""
        self.taken = True
        return self.wire.payload(self.preamble, Deadline(FRAME_S))

    def answer(self, header: Mapping[str, object], payload: bytes = b"") -> None:
        """The answer's last frame."""
        self.wire.send(Kind.ANSWER, self.number, header, self.deadline, [memoryview(payload)])


class WorkerSession:
    """Serves one connection until it ends; made for ``kvcomm.serve.server.Server``."""

    leases = 0

    def __init__(
        self, worker: Worker, wire: Wire, authenticate: Authenticate,
        holds: Callable[[Grant], bool] = lambda grant: True,
    ) -> None:  # fmt: skip
        self._worker, self._wire = worker, wire
        self._authenticate, self._holds = authenticate, holds
        self._stopping = threading.Event()
        self._busy = False

    def run(self) -> None:
        """Serve; returns when the connection ended, for whatever reason."""
        try:
            grant = self._greet()
            while not self._stopping.is_set() and self._wire.idle(IDLE_S):
                preamble, header = self._wire.receive(Deadline(FRAME_S))
                self._busy = True
                if self._stopping.is_set():
                    raise StoreUnavailable("the worker is stopping; connect again later")
                self._serve(grant, preamble, header)
                self._busy = False
        except ProtocolError as error:
            self._refuse(0, error)
        except KVCommError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._wire.close()

    def stop(self, *, now: bool = False) -> None:
        """End after the request at work, or in the middle of it."""
        self._stopping.set()
        if now or not self._busy:
            self._wire.close()

    def _greet(self) -> Grant:
        deadline = Deadline(HELLO_S)
        preamble, header = self._wire.receive(deadline)
        members = Members(header)
        try:
            if preamble.kind is not Kind.REQUEST or members.text("call", 32) != "hello" or preamble.payload_bytes:
                raise ProtocolError("a connection begins with hello; the connection is closed")
            token = members.text("token", MAX_TOKEN_CHARS)
            members.end()
            grant = self._authenticate(token.encode())
            mine = self._worker.engine.namespace.name
            if grant.namespace != mine:
                raise AccessDenied(f"this worker serves another namespace than {grant.namespace}; ask its own worker")
        except AccessDenied as error:
            self._refuse(preamble.number, error)
            raise
        answer = {"namespace": grant.namespace, "rights": sorted(grant.rights)}
        self._wire.send(Kind.ANSWER, preamble.number, answer, deadline)
        return grant

    def _serve(self, grant: Grant, preamble: Preamble, header: dict[str, object]) -> None:
        if preamble.kind is not Kind.REQUEST:
            raise ProtocolError(f"a client sent a frame of kind {preamble.kind.name}; the connection is closed")
        members = Members(header)
        ask = Ask(self._wire, preamble, members, Deadline((preamble.deadline_ms or DEFAULT_DEADLINE_MS) / 1000))
        try:
            name = members.text("call", 32)
            call = self._worker.calls.get(name)
            if call is None:
                raise ProtocolError(f"a worker of role {self._worker.role} does not answer {name!r}; ask another one")
            if not self._holds(grant):
                raise AccessDenied("the token was revoked or has expired; use another one")
            grant.need(READ)
            call(ask)
        except KVCommError as error:
            self._after(ask, error)
        except Exception as error:
            log.exception("a request failed")
            self._after(ask, StoreUnavailable(f"the worker failed inside ({type(error).__name__}); its log says more"))

    def _after(self, ask: Ask, error: KVCommError) -> None:
        """Refuse; where the payload was not taken, nothing can follow on this connection."""
        self._wire.send(Kind.REFUSAL, ask.number, refusal(error), Deadline(1.0))
        if not ask.taken:
            self._wire.leave(Deadline(0.5))
            raise error

    def _refuse(self, number: int, error: KVCommError) -> None:
        try:
            self._wire.send(Kind.REFUSAL, number, refusal(error), Deadline(0.5))
            self._wire.leave(Deadline(0.5))
        except KVCommError:
            pass
