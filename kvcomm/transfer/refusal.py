"""Errors as they cross the wire: a code and a message; what a client raises for each."""

from __future__ import annotations

from kvcomm.errors import (
    AccessDenied,
    CorruptEntry,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidInput,
    KVCommError,
    Overloaded,
    ProtocolError,
    StoreUnavailable,
    Superseded,
)
from kvcomm.transfer.schema import Members

MAX_MESSAGE = 500
_CODES: dict[str, type[KVCommError]] = {
    "overloaded": Overloaded,
    "protocol": ProtocolError,
    "deadline": DeadlineExceeded,
    "unavailable": StoreUnavailable,
    "denied": AccessDenied,
    "corrupt": CorruptEntry,
    "fingerprint": FingerprintMismatch,
    "superseded": Superseded,
    "invalid": InvalidInput,
}


def refusal(error: KVCommError) -> dict[str, object]:
    """The header of a refusal."""
    code = next((code for code, kind in _CODES.items() if isinstance(error, kind)), "unavailable")
    return {"code": code, "message": str(error)[:MAX_MESSAGE]}


def refused(header: dict[str, object]) -> KVCommError:
    """The error that a refusal stands for; codes of a newer service are StoreUnavailable."""
    found = Members(header, "refusal")
    code, message = found.text("code", 32), found.text("message", MAX_MESSAGE)
    return _CODES.get(code, StoreUnavailable)(f"the service says: {message}")
