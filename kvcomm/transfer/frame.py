"""One frame of the service's protocol: 48 bytes, a header of JSON, a payload. The layout is in docs/format.md.

Nothing here touches a socket. Lengths are checked against their limits before anybody takes memory for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from kvcomm.errors import ProtocolError

MAGIC = b"\x89KVT"
VERSION = 1
PREAMBLE_BYTES = 48
MAX_HEADER_BYTES = 64 << 10
MAX_PART_BYTES = 16 << 20
MAX_DEADLINE_MS = 3_600_000
CHECKED = 1
_FIXED = struct.Struct("<4sBBHIIQIIQ")
_CHECK = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    ANSWER = 2  # the last frame of an answer
    REFUSAL = 3  # an answer that is an error
    PART = 4  # one of several frames of an answer, more follow
    NOTICE = 5  # pushed by the service to those who watch


@dataclass(frozen=True, slots=True)
class Preamble:
    """The fixed part of a frame.

    Attributes:
        number: of the request; its answer's frames carry the same.
        deadline_ms: in a request, milliseconds that its sender still waits, counted from the arrival of the frame.
        check: xxh3-64 of the payload, if ``checked``; entries' bytes carry their own checks and need none.
    """

    kind: Kind
    checked: bool
    header_bytes: int
    payload_bytes: int
    number: int
    deadline_ms: int
    check: int


def pack(
    kind: Kind, number: int, header: Mapping[str, object] | None = None, payload: Sequence[memoryview] = (), *,
    deadline_ms: int = 0, checked: bool = True, payload_bytes: int | None = None,
) -> bytes:  # fmt: skip
    """Preamble and header of a frame; its payload is sent behind them as it lies.

    Args:
        payload: buffers whose checksum is taken; with ``checked=False`` only their lengths count.
        payload_bytes: length of a payload that is sent from elsewhere, unchecked.

    Raises:
        ProtocolError: header or payload exceed their limits.
    """
    text = b"" if header is None else json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    size = sum(len(buffer) for buffer in payload) if payload_bytes is None else payload_bytes
    _limit("header", len(text), MAX_HEADER_BYTES)
    _limit("payload", size, MAX_PART_BYTES)
    checked = checked and payload_bytes is None
    fixed = _FIXED.pack(
        MAGIC, VERSION, kind, CHECKED if checked else 0, len(text), size, number,
        max(0, min(deadline_ms, MAX_DEADLINE_MS)), 0, payload_check(payload) if checked else 0,
    )  # fmt: skip
    return fixed + _CHECK.pack(xxhash.xxh3_64_intdigest(fixed + text)) + text


def unpack(data: bytes | bytearray | memoryview) -> Preamble:
    """Split the first 48 bytes of a frame.

    Raises:
        ProtocolError: anything in them is unknown or exceeds its limit.
    """
    if len(data) != PREAMBLE_BYTES:
        raise ProtocolError(f"a preamble of {len(data)} bytes has not {PREAMBLE_BYTES}; the connection is closed")
    magic, version, kind, flags, header, payload, number, deadline, zero, check = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {bytes(magic)!r}, not {MAGIC!r}; this port speaks kvcomm's protocol")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version} is unknown, this side speaks {VERSION}; update kvcomm")
    if not Kind.REQUEST <= kind <= Kind.NOTICE or flags & ~CHECKED or zero:
        raise ProtocolError(f"kind {kind}, flags {flags:#x} or reserved {zero:#x} are unknown; update kvcomm")
    _limit("header", header, MAX_HEADER_BYTES)
    _limit("payload", payload, MAX_PART_BYTES)
    _limit("deadline", deadline, MAX_DEADLINE_MS)
    if check and not flags & CHECKED:
        raise ProtocolError("a payload without a check has one; the connection is closed")
    return Preamble(Kind(kind), bool(flags & CHECKED), header, payload, number, deadline, check)


def open_header(data: bytes | bytearray | memoryview, header: bytes | bytearray | memoryview) -> dict[str, object]:
    """The header behind a preamble's 48 bytes, as a JSON object; an empty one where it has no bytes.

    Raises:
        ProtocolError: preamble and header fail their check, or it is no JSON object.
    """
    fixed, check = bytes(data[: _FIXED.size]), _CHECK.unpack_from(data, _FIXED.size)[0]
    if xxhash.xxh3_64_intdigest(fixed + bytes(header)) != check:
        raise ProtocolError("a frame's preamble and header fail their checksum; the connection is closed")
    if not len(header):
        return {}
    try:
        found = json.loads(bytes(header))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's header is no JSON ({str(error)[:100]}); the connection is closed") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"a frame's header is a {type(found).__name__}, no object; the connection is closed")
    return found


def payload_check(buffers: Sequence[memoryview]) -> int:
    """xxh3-64 over ``buffers`` in order."""
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.intdigest()


def _limit(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise ProtocolError(f"a frame's {what} of {value} exceeds {limit}; send less in one frame")
