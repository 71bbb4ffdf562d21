"""One connection to the service: each call answered or refused, timed and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreUnavailable
from kvcomm.serve import calls_follow, calls_learned, calls_read, calls_service, calls_write
from kvcomm.serve.call import Call, Leases
from kvcomm.serve.conversation import FRAME_S, Conversation
from kvcomm.serve.core import Core, Done
from kvcomm.store.base import Deadline
from kvcomm.transfer.auth import Grant
from kvcomm.transfer.frame import Kind, Preamble
from kvcomm.transfer.refusal import refusal
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire

log = logging.getLogger(__name__)
GRANT_S = 2.0
DEFAULT_DEADLINE_MS = 10_000


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


class Session(Conversation):
    """One connection to the anchor service."""

    def __init__(self, core: Core, wire: Wire) -> None:
        super().__init__(wire)
        self._core = core
        self._leases = Leases()
        self._checked = 0.0

    @property
    def leases(self) -> int:
        """Entries that are pinned."""
        return len(self._leases.held)

    def _end(self) -> None:
        self._leases.close()
        super()._end()

    def _admit(self, token: bytes) -> Grant:
        try:
            return self._core.authenticate(token)
        except AccessDenied:
            self._core.on_denied("unknown", "", "hello")
            raise

    def _serve(self, grant: Grant, preamble: Preamble, asked: Members) -> None:
        started, received, sent = time.perf_counter(), self._wire.received, self._wire.sent
        deadline = Deadline((preamble.deadline_ms or DEFAULT_DEADLINE_MS) / 1000)
        call = Call(
            self._core, grant, self._wire, self._leases, preamble, asked, deadline, self._stopping.is_set
        )  # fmt: skip
        name = "unknown"
        try:
            wanted = asked.text("call", 32)
            known = CALLS.get(wanted)
            if known is None:
                raise ProtocolError(f"call {wanted!r} is unknown; update the service")
            name = wanted
            self._check_grant(grant)
            if known.right not in grant.rights:
                raise AccessDenied(f"{name} needs the right {known.right!r}, which the token has not; use another one")
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
