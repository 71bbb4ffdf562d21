"""Values between the answer's process and the tests': builtin ones of exact types, as framed JSON. Nothing else passes.

What an answer's function returns can thus not bring an ``__eq__`` of its own to the comparison.
"""

import json
import os
from typing import Any

MAX_FRAME = 16 * 2**20
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Broken(Exception):
    """The other side ended, or sent what is no frame."""


def encode(value: Any) -> Any:
    """``value`` as JSON; instances of subclasses become the builtin type, other types are a TypeError."""
    if value is None or type(value) in (bool, str, float):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else ["int", hex(value)]
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes | bytearray):
        return [("bytes", "bytearray")[isinstance(value, bytearray)], value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(item) for item in value]]
    raise TypeError(f"a {type(value).__name__} cannot be compared: only builtin values can")


def decode(said: Any) -> Any:
    """The value that ``encode`` was given; ValueError for anything that it does not say."""
    if not isinstance(said, list):
        if isinstance(said, dict):
            raise ValueError("an object is no value")
        return said
    name, rest = said
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray).fromhex(rest)
    if name == "int":
        return int(rest, 16)
    if name == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if name == "dict":
        return {decode(key): decode(item) for key, item in rest}
    if name in _SEQUENCES and isinstance(rest, list):
        return _SEQUENCES[name](decode(item) for item in rest)
    raise ValueError("an unknown kind of value")


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one frame: its length in 4 bytes, then JSON."""
    block = json.dumps(message).encode()
    block = len(block).to_bytes(4, "big") + block
    try:
        while block:
            block = block[os.write(descriptor, block) :]
    except OSError as error:
        raise Broken(str(error)) from None


def receive(descriptor: int) -> dict[str, Any]:
    """Read one frame, an object."""
    size = int.from_bytes(_read(descriptor, 4), "big")
    if size > MAX_FRAME:
        raise Broken(f"a frame of {size} bytes")
    try:
        message = json.loads(_read(descriptor, size))
    except (ValueError, RecursionError):
        raise Broken("a frame that is not JSON") from None
    if not isinstance(message, dict):
        raise Broken("a frame that is no object")
    return message


def _read(descriptor: int, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        block = os.read(descriptor, min(size - len(got), 65536))
        if not block:
            raise Broken("it ended")
        got += block
    return bytes(got)
