"""One connection to a worker: request after request, each answered or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.serve.conversation import FRAME_S, Conversation
from kvcomm.serve.core import Authenticate
from kvcomm.serve.worker import Worker
from kvcomm.store.base import Deadline
from kvcomm.transfer.auth import READ, Grant
from kvcomm.transfer.frame import Kind, Preamble
from kvcomm.transfer.refusal import refusal
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire

log = logging.getLogger(__name__)
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


class WorkerSession(Conversation):
    """One connection to a worker; made for ``kvcomm.serve.server.Server``."""

    def __init__(
        self, worker: Worker, wire: Wire, authenticate: Authenticate,
        holds: Callable[[Grant], bool] = lambda grant: True,
    ) -> None:  # fmt: skip
        super().__init__(wire)
        self._worker, self._authenticate, self._holds = worker, authenticate, holds

    def _admit(self, token: bytes) -> Grant:
        grant = self._authenticate(token)
        if grant.namespace != self._worker.engine.namespace.name:
            raise AccessDenied(f"this worker serves another namespace than {grant.namespace}; ask its own worker")
        return grant

    def _serve(self, grant: Grant, preamble: Preamble, asked: Members) -> None:
        ask = Ask(self._wire, preamble, asked, Deadline((preamble.deadline_ms or DEFAULT_DEADLINE_MS) / 1000))
        try:
            name = asked.text("call", 32)
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
