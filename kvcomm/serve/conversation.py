"""One connection to whatever serves: a token first, then one request after the other, until it ends."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.auth import Grant
from kvcomm.transfer.frame import Kind, Preamble
from kvcomm.transfer.refusal import refusal
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire

log = logging.getLogger(__name__)
HELLO_S = 5.0
FRAME_S = 30.0
IDLE_S = 300.0
MAX_TOKEN_CHARS = 512


class Conversation(ABC):
    """Serves one connection in the thread that calls ``run``; ``stop`` may be called from another."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._stopping = threading.Event()
        self._busy = False

    @property
    def leases(self) -> int:
        """Entries that the client has pinned."""
        return 0

    def run(self) -> None:
        """Serve; returns when the connection ended, for whatever reason."""
        try:
            grant = self._greet()
            while not self._stopping.is_set() and self._wire.idle(IDLE_S):
                preamble, header = self._wire.receive(Deadline(FRAME_S))
                self._busy = True
                if self._stopping.is_set():
                    raise StoreUnavailable("the service is stopping; connect again later")
                if preamble.kind is not Kind.REQUEST:
                    raise ProtocolError(f"a client sent a frame of kind {preamble.kind.name}; the connection is closed")
                self._serve(grant, preamble, Members(header))
                self._busy = False
        except ProtocolError as error:
            self._refuse(0, error)
        except KVCommError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._end()

    def stop(self, *, now: bool = False) -> None:
        """End after the request that runs, or in the middle of it."""
        self._stopping.set()
        if now or not self._busy:
            self._wire.close()

    @abstractmethod
    def _admit(self, token: bytes) -> Grant:
        """What a token allows here. Raises AccessDenied."""

    @abstractmethod
    def _serve(self, grant: Grant, preamble: Preamble, asked: Members) -> None:
        """Answer or refuse one request; what it raises ends the connection."""

    def _end(self) -> None:
        self._wire.close()

    def _greet(self) -> Grant:
        deadline = Deadline(HELLO_S)
        preamble, header = self._wire.receive(deadline)
        members = Members(header)
        if preamble.kind is not Kind.REQUEST or members.text("call", 32) != "hello" or preamble.payload_bytes:
            raise ProtocolError("a connection begins with hello; the connection is closed")
        token = members.text("token", MAX_TOKEN_CHARS)
        members.end()
        try:
            grant = self._admit(token.encode())
        except AccessDenied as error:
            self._refuse(preamble.number, error)
            raise
        answer = {"namespace": grant.namespace, "rights": sorted(grant.rights)}
        self._wire.send(Kind.ANSWER, preamble.number, answer, deadline)
        return grant

    def _refuse(self, number: int, error: KVCommError) -> None:
        try:
            self._wire.send(Kind.REFUSAL, number, refusal(error), Deadline(0.5))
            self._wire.leave(Deadline(0.5))
        except KVCommError:
            pass
