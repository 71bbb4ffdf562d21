"""One connection: a token first, then one call after the other, each answered or refused; a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.serve import calls_follow, calls_learned, calls_read, calls_service, calls_write
from kvcomm.serve.call import Call, Leases
from kvcomm.serve.core import Core, Done
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
GRANT_S = 2.0
DEFAULT_DEADLINE_MS = 10_000
MAX_TOKEN_CHARS = 512


@dataclass(frozen=True, slots=True)
class _Known:
    right: str
    run: Callable[[Call], None]


CALLS: dict[str, _Known] = {
    "open": _Known("read", calls_read.open_entry),
    "read": _Known("read", calls_read.read),
    "release": _Known("read", calls_read.release),
    "suspect": _Known("read", calls_read.suspect),
    "contains": _Known("read", calls_read.contains),
    "contains_many": _Known("read", calls_read.contains_many),
    "entries": _Known("read", calls_read.entries),
    "stats": _Known("read", calls_read.stats),
    "blob_read": _Known("read", calls_read.blob_read),
    "blob_names": _Known("read", calls_read.blob_names),
    "watch": _Known("read", calls_service.watch),
    "health": _Known("read", calls_service.health),
    "follow": _Known("read", calls_follow.follow),
    "nearest": _Known("read", calls_follow.nearest),
    "sums_others": _Known("read", calls_learned.sums_others),
    "sums_open": _Known("write", calls_learned.sums_open),
    "sums_put": _Known("write", calls_learned.sums_put),
    "sums_forget": _Known("admin", calls_learned.sums_forget),
    "sums_retire": _Known("admin", calls_learned.sums_retire),
    "put": _Known("write", calls_write.put),
    "begin": _Known("write", calls_write.begin),
    "part": _Known("write", calls_write.part),
    "commit": _Known("write", calls_write.commit),
    "abort": _Known("write", calls_write.abort),
    "blob_write": _Known("write", calls_write.blob_write),
    "blob_delete": _Known("write", calls_write.blob_delete),
    "delete": _Known("write", calls_write.delete),
    "delete_group": _Known("write", calls_write.delete_group),
    "touch": _Known("write", calls_write.touch),
    "flush": _Known("write", calls_write.flush),
    "claim": _Known("write", calls_write.claim),
    "unclaim": _Known("write", calls_write.unclaim),
    "delete_namespace": _Known("admin", calls_write.delete_namespace),
}


class Session:
    """Serves one connection until it ends. ``stop`` may be called from another thread."""

    def __init__(self, core: Core, wire: Wire) -> None:
        self._core, self._wire = core, wire
        self._leases = Leases()
        self._stopping = threading.Event()
        self._busy = False
        self._checked = 0.0

    def run(self) -> None:
        """Serve; returns when the connection ended, for whatever reason."""
        try:
            grant = self._greet()
            while not self._stopping.is_set() and self._wire.idle(IDLE_S):
                preamble, header = self._wire.receive(Deadline(FRAME_S))
                self._busy = True
                if self._stopping.is_set():
                    raise StoreUnavailable("the service is stopping; connect again later")
                self._serve(grant, preamble, header)
                self._busy = False
        except ProtocolError as error:
            self._refuse(0, error)
        except KVCommError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._leases.close()
            self._wire.close()

    @property
    def leases(self) -> int:
        """Entries that are pinned."""
        return len(self._leases.held)

    def stop(self, *, now: bool = False) -> None:
        """End after the call that runs, or in the middle of it."""
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
            grant = self._core.authenticate(token.encode())
        except AccessDenied as error:
            self._core.on_denied("unknown", "", "hello")
            self._refuse(preamble.number, error)
            raise
        self._wire.send(
            Kind.ANSWER, preamble.number, {"namespace": grant.namespace, "rights": sorted(grant.rights)}, deadline
        )
        return grant

    def _serve(self, grant: Grant, preamble: Preamble, header: dict[str, object]) -> None:
        started, received, sent = time.perf_counter(), self._wire.received, self._wire.sent
        members = Members(header)
        deadline = Deadline((preamble.deadline_ms or DEFAULT_DEADLINE_MS) / 1000)
        if preamble.kind is not Kind.REQUEST:
            raise ProtocolError(f"a client sent a frame of kind {preamble.kind.name}; the connection is closed")
        call = Call(
            self._core, grant, self._wire, self._leases, preamble, members, deadline, self._stopping.is_set
        )  # fmt: skip
        name = "unknown"
        try:
            asked = members.text("call", 32)
            known = CALLS.get(asked)
            if known is None:
                raise ProtocolError(f"call {asked!r} is unknown; update the service")
            name = asked
            self._check_grant(grant)
            if known.right not in grant.rights:
                raise AccessDenied(f"{asked} needs the right {known.right!r}, which the token has not; use another one")
            known.run(call)
        except KVCommError as error:
            call.outcome = str(refusal(error)["code"])
            if isinstance(error, AccessDenied):
                self._core.on_denied(grant.token_id or "local", grant.namespace, name)
            self._after_error(call, error)
        except Exception as error:
            call.outcome = "bug"
            log.exception("call %s failed", name)
            self._after_error(
                call, StoreUnavailable(f"the service failed inside ({type(error).__name__}); its log says more")
            )
        finally:
            seconds = time.perf_counter() - started
            self._core.on_done(
                Done(name, grant.namespace, call.outcome, seconds, self._wire.received - received,
                     self._wire.sent - sent)
            )  # fmt: skip

    def _check_grant(self, grant: Grant) -> None:
        """Ask now and then whether the grant still holds; a connection may outlive it by two seconds."""
        now = time.monotonic()
        if now - self._checked > GRANT_S:
            if not self._core.holds(grant):
                raise AccessDenied("the token was revoked or has expired; use another one")
            self._checked = now

    def _after_error(self, call: Call, error: KVCommError) -> None:
        """Refuse, and read past the payload that nobody took, so that the next call finds its place."""
        if call.answered or call.lost:
            raise error
        self._wire.send(Kind.REFUSAL, call.preamble.number, refusal(error), Deadline(1.0))
        left = 0 if call.taken else call.preamble.payload_bytes
        room = memoryview(bytearray(min(left, 1 << 18)))
        deadline = Deadline(FRAME_S)
        while left:
            size = min(left, len(room))
            self._wire.fill([room[:size]], deadline)
            left -= size

    def _refuse(self, number: int, error: KVCommError) -> None:
        try:
            self._wire.send(Kind.REFUSAL, number, refusal(error), Deadline(0.5))
            self._wire.leave(Deadline(0.5))
        except KVCommError:
            pass
