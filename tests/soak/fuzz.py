"""Decoders against bytes that nobody wrote: only their own errors come out, in time and in bounded memory.

``python -m tests.soak.fuzz --seconds 60`` gives each decoder a minute; the suite runs a short form. Checksums are off:
every check is a constant, for the one that wrote the sample and for the reader, so that what lies behind is reached.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvcomm.anchors.saved import dump
from kvcomm.errors import AccessDenied, CorruptEntry, InvalidInput, KVCommError, ProtocolError
from kvcomm.serve.snapshot import read_snapshot
from kvcomm.serve.tokens import TokenFile
from kvcomm.store import MemoryStore
from kvcomm.store.codec import BytesSource, EntryReader, EntryWriter, entry_view
from kvcomm.store.coordinator import Nearby
from kvcomm.store.testing import ONE, sample
from kvcomm.transfer.frame import PREAMBLE_BYTES, Kind, open_header, pack, unpack
from kvcomm.transfer.names import (
    fingerprint_text,
    key_text,
    listing_lines,
    look_ups,
    read_fingerprint,
    read_key,
    read_listings,
    read_look_up,
)
from kvcomm.transfer.news import News, change_lines, nearby_pages, read_changes, read_nearby
from kvcomm.transfer.refusal import refusal, refused
from tests.serve.sums import MODEL, learned

SLOWEST_S = 2.0
GROWTH_BYTES = 400 << 20
PIECES = [
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"18446744073709551616", b'"', b"{", b"}", b"[" * 50,
    b"]", b",", b":", b"\\ud800", b"\\u0000", b"\xff\xfe", b"\x00" * 8, b"\xff" * 8, b"../", b'"__class__"', b"F64",
    b"1" * 5000, b'{"a":1}', b"\n", b"kvc_", b"_",
]  # fmt: skip


class NoChecks:
    """Stands in for xxhash: every check is zero."""

    xxh3_64_intdigest = staticmethod(lambda data, seed=0: 0)
    xxh3_128_digest = staticmethod(lambda data, seed=0: bytes(16))

    class xxh3_128:
        def __init__(self, seed: int = 0) -> None:
            pass

        def update(self, data: Any) -> None:
            pass

        def digest(self) -> bytes:
            return bytes(16)

        def intdigest(self) -> int:
            return 0

    xxh3_64 = xxh3_128


@contextmanager
def unchecked() -> Iterator[None]:
    with (
        patch("kvcomm.store.format.xxhash", NoChecks),
        patch("kvcomm.store.codec.xxhash", NoChecks),
        patch("kvcomm.transfer.frame.xxhash", NoChecks),
    ):
        yield


@dataclass(frozen=True)
class Target:
    """A decoder, what it is known to read, and the only errors that it may raise."""

    samples: list[bytes]
    decode: Callable[[bytes], object]
    errors: tuple[type[KVCommError], ...]


def _frame(data: bytes) -> None:
    preamble = unpack(data[:PREAMBLE_BYTES])
    open_header(data[:PREAMBLE_BYTES], data[PREAMBLE_BYTES : PREAMBLE_BYTES + preamble.header_bytes])


def _entry(data: bytes) -> None:
    entry_view(memoryview(bytearray(data)), "one")
    EntryReader(BytesSource(data), "one").verify()


def _message(data: bytes) -> None:
    """Each line by the reader that its first byte chooses."""
    which, body = data[:1], data[1:]
    text = body.decode("utf-8", "replace")
    if which == b"k":
        read_key(text, ONE)
    elif which == b"f":
        read_fingerprint(text)
    elif which == b"l":
        read_listings(body, ONE, 0.0)
    elif which == b"c":
        read_changes(body, ONE)
    elif which == b"n":
        read_nearby(body, ONE)
    elif which == b"m":
        read_look_up(body, ONE)
    elif which == b"r":
        import json

        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict):
            refused(found)


@contextmanager
def targets() -> Iterator[dict[str, Target]]:
    """All decoders, with the checks off while they are used."""
    key, entry = sample(1, tokens=5)
    with unchecked(), tempfile.TemporaryDirectory() as folder, TokenFile(Path(folder) / "t", create=True) as tokens:
        token = tokens.create(ONE, frozenset(("read",))).reveal().encode()

        def authenticate(data: bytes) -> None:
            tokens.authenticate(data)
            if data != token:
                raise AssertionError(f"{data!r} was let in")

        with MemoryStore(1 << 20) as store:
            store.put(key, entry)
            listed = b"".join(listing_lines(store.entries()))
        whole = b"".join(bytes(b) for part in EntryWriter(key, entry, "raw", 0.0, None) for b in part)
        news = [News("added", key, "g"), News("removed", key, ""), News("dropped", None, "g")]
        messages = [
            b"k" + key_text(key).encode(), b"f" + fingerprint_text(key.fingerprint).encode(), b"l" + listed,
            b"c" + b"".join(change_lines(news)), b"n" + b"".join(nearby_pages([Nearby(entry.segment, 0.5, (key,))])),
            b"m" + b"".join(page for _, page in look_ups([key, key])),
            b"r" + str(refusal(InvalidInput("x"))).replace("'", '"').encode(),
        ]  # fmt: skip
        requests = [
            pack(Kind.REQUEST, 7, {"call": "open", "key": key_text(key), "lease_ms": 5}, deadline_ms=9),
            pack(Kind.ANSWER, 2**64 - 1, {}), pack(Kind.NOTICE, 1, {"version": 1, "groups": ["a"]}, [memoryview(b"x")]),
        ]  # fmt: skip
        yield {
            "frame": Target(requests, _frame, (ProtocolError,)),
            "entry": Target([whole], _entry, (CorruptEntry,)),
            "sums": Target([dump(learned(1)), dump(learned(1, 2))], lambda d: read_snapshot(d, MODEL, 1 << 20),
                           (CorruptEntry, InvalidInput)),
            "token": Target([token], authenticate, (AccessDenied,)),
            "message": Target(messages, _message, (ProtocolError,)),
        }  # fmt: skip


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """``data`` after one to six changes: bits, bytes, numbers, pieces in and out, and the end of another sample."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 2, 4, 8, 8, 64))
        kind = rng.randrange(8)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at:at] = rng.choice(PIECES)
        elif kind == 3:
            out[at : at + size] = rng.choice(PIECES)
        elif kind == 4:
            del out[at : at + size]
        elif kind == 5:
            out[at : at + 8] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 6:
            out[at:at] = out[at : at + size]
        else:
            out[at:] = other[min(at, len(other)) :]
    return bytes(out)


def fuzz(target: Target, seconds: float, seed: int) -> dict[str, int]:
    """Give the target changed samples for some seconds; how many, and how many it took for good."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tried = good = 0
    for one in target.samples:
        target.decode(one)  # a sample that is refused would make all of this say nothing
    while time.monotonic() < end:
        data = mutated(rng.choice(target.samples), rng.choice(target.samples), rng)
        started = time.process_time()
        try:
            target.decode(data)
            good += 1
        except target.errors:
            pass
        except BaseException as error:
            raise AssertionError(f"seed {seed}, input {tried}: {type(error).__name__} of {data[:3000]!r}") from error
        took = time.process_time() - started
        if took > SLOWEST_S:
            raise AssertionError(f"seed {seed}, input {tried} took {took:.1f} s: {data[:300]!r}")
        tried += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if grown > GROWTH_BYTES:
        raise AssertionError(f"memory grew by {grown >> 20} MiB")
    return {"tried": tried, "good": good}


def main() -> None:
    """Fuzz every decoder, or the one that is named."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--only", default="")
    chosen = arguments.parse_args()
    with targets() as all_of_them:
        for name, target in all_of_them.items():
            if chosen.only in ("", name):
                print(name, fuzz(target, chosen.seconds, chosen.seed), flush=True)


if __name__ == "__main__":
    main()
