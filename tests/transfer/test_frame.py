"""Malformed frames and calls: each is refused with its error, soon, in bounded memory, and the service goes on."""

from __future__ import annotations

import json
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from kvcomm.errors import ProtocolError
from kvcomm.store.base import Deadline
from kvcomm.store.codec import EntryWriter
from kvcomm.store.testing import TWO, fingerprint, holds, sample
from kvcomm.transfer.address import Address
from kvcomm.transfer.frame import MAX_HEADER_BYTES, MAX_PART_BYTES, Kind, open_header, pack, unpack
from kvcomm.transfer.names import MAX_LOOK_UP_BYTES, MAX_LOOKED_UP, fingerprint_text, key_text
from kvcomm.transfer.remote import RemoteStore
from kvcomm.transfer.wire import Wire
from tests.serve.here import service_here

KEY = key_text(sample(1)[0])
KEYS = KEY.encode() + b"\n"
MODEL = fingerprint_text(fingerprint())
FIXED = struct.Struct("<4sBBHIIQIIQ")


def frame(
    magic: bytes = b"\x89KVT", version: int = 1, kind: int = 1, flags: int = 0, header: bytes = b"{}",
    header_bytes: int | None = None, payload: bytes = b"", payload_bytes: int | None = None, number: int = 7,
    deadline: int = 0, zero: int = 0, check: int = 0, head_check: int | None = None,
) -> bytes:  # fmt: skip
    """A frame with any field as told."""
    fixed = FIXED.pack(
        magic, version, kind, flags, len(header) if header_bytes is None else header_bytes,
        len(payload) if payload_bytes is None else payload_bytes, number, deadline, zero, check,
    )  # fmt: skip
    right = xxhash.xxh3_64_intdigest(fixed + header)
    return fixed + struct.pack("<Q", right if head_check is None else head_check) + header + payload


def call(name: str, payload: bytes = b"", /, **members: Any) -> bytes:
    """A well-formed frame that asks for something."""
    return frame(header=json.dumps({"call": name, **members}).encode(), payload=payload)


BROKEN_FRAMES = {
    "empty magic": frame(magic=b"\0\0\0\0"),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" + b" " * 48,
    "stored entry": frame(magic=b"\x89KVC"),
    "pickle": pickle.dumps({"call": "stats"}) + b"." * 64,
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
    "version 0": frame(version=0),
    "version 2": frame(version=2),
    "version 255": frame(version=255),
    "kind 0": frame(kind=0),
    "kind 6": frame(kind=6),
    "kind 255": frame(kind=255),
    "an answer": frame(kind=2),
    "a refusal": frame(kind=3),
    "a part": frame(kind=4),
    "a notice": frame(kind=5),
    "flag 2": frame(flags=2),
    "all flags": frame(flags=0xFFFF),
    "reserved": frame(zero=1),
    "header of 4 GiB": frame(header_bytes=2**32 - 1),
    "header too long by one": frame(header_bytes=MAX_HEADER_BYTES + 1),
    "payload of 4 GiB": frame(payload_bytes=2**32 - 1),
    "payload too long by one": frame(payload_bytes=MAX_PART_BYTES + 1),
    "deadline too long": frame(deadline=3_600_001),
    "check without flag": frame(check=1),
    "head check wrong": frame(head_check=0),
    "header changed": frame(header=b"{}")[:-1] + b"]",
    "no json": frame(header=b"{call}"),
    "a list": frame(header=b"[1]"),
    "a number": frame(header=b"1"),
    "null": frame(header=b"null"),
    "not utf-8": frame(header=b'{"call":"\xff\xfe"}'),
    "half a string": frame(header=b'{"call":"sta'),
    "deep": frame(header=b"[" * 30000),
    "deep objects": frame(header=b'{"a":' * 9000),
    "pickle as header": frame(header=pickle.dumps({"call": "stats"})),
    "wrong payload check": frame(header=b'{"call":"put","left_ms":null}', flags=1, check=5, payload=b"abc"),
}
BIG = "9" * 4000
REFUSED_CALLS = {
    "no call": frame(header=b"{}"),
    "call is a number": frame(header=b'{"call":1}'),
    "call is null": frame(header=b'{"call":null}'),
    "call is a list": frame(header=b'{"call":["stats"]}'),
    "unknown call": call("exec"),
    "private name": call("__init__"),
    "long call": call("a" * 1000),
    "hello again": call("hello", token="one"),
    "stats with more": call("stats", namespace="two"),
    "stats with payload": call("stats", b"abc"),
    "contains without key": call("contains"),
    "contains with namespace": call("contains", key=KEY, namespace="two"),
    "key is an object": call("contains", key=json.loads(KEY)),
    "key is no json": call("contains", key="{"),
    "key is a list": call("contains", key="[]"),
    "key is empty": call("contains", key="{}"),
    "key too long": call("contains", key=" " * 40000),
    "key deep": call("contains", key="[" * 20000),
    "content short": call("contains", key=KEY.replace(sample(1)[0].content, "ab")),
    "content upper case": call("contains", key=KEY.replace(sample(1)[0].content, sample(1)[0].content.upper())),
    "content a path": call("contains", key=KEY.replace(sample(1)[0].content, "../" * 21 + "a")),
    "origin unknown": call("contains", key=KEY.replace("isolated", "elsewhere")),
    "exact is a number": call("contains", key=KEY.replace("false", "0")),
    "layers 0": call("contains", key=KEY.replace('n_layers\\":2', 'n_layers\\":0')),
    "layers negative": call("contains", key=KEY.replace('n_layers\\":2', 'n_layers\\":-2')),
    "layers many": call("contains", key=KEY.replace('n_layers\\":2', 'n_layers\\":1000000')),
    "layers a fraction": call("contains", key=KEY.replace('n_layers\\":2', 'n_layers\\":2.5')),
    "layers true": call("contains", key=KEY.replace('n_layers\\":2', 'n_layers\\":true')),
    "dtype unknown": call("contains", key=KEY.replace("float32", "float31")),
    "dtype a function": call("contains", key=KEY.replace("float32", "load")),
    "many without a payload": call("contains_many"),
    "many with a namespace": call("contains_many", KEYS, namespace="two"),
    "many with a key in its header": call("contains_many", KEYS, key=KEY),
    "many with a namespace in a key": call("contains_many", KEYS.replace(b'"content"', b'"namespace":"two","content"')),
    "many without an end": call("contains_many", KEYS[:-1]),
    "many with an empty line": call("contains_many", KEYS + b"\n"),
    "many of no keys": call("contains_many", b"\n"),
    "many with a number": call("contains_many", b"7\n"),
    "many with a list": call("contains_many", b"[" + KEYS[:-1] + b"]\n"),
    "many not in ASCII": call("contains_many", KEYS.replace(b"isolated", b"isolated\xff")),
    "many that are nearly all good": call("contains_many", KEYS + KEYS.replace(b"isolated", b"elsewhere")),
    "many and one more": call("contains_many", KEYS * (MAX_LOOKED_UP + 1)),
    "many lines of nothing": call("contains_many", b"\n" * MAX_LOOK_UP_BYTES),
    "many bytes and one more": call("contains_many", KEYS + b" " * (MAX_LOOK_UP_BYTES - len(KEYS)) + b"\n"),
    "many in one long line": call("contains_many", KEYS[:-1] + b" " * 32768 + b"\n"),
    "many deep": call("contains_many", b"[" * 20000 + b"\n"),
    "many as a pickle": call("contains_many", pickle.dumps([1, 2, 3]) + b"\n"),
    "lease 0": call("open", key=KEY, lease_ms=0),
    "lease negative": call("open", key=KEY, lease_ms=-1),
    "lease too long": call("open", key=KEY, lease_ms=3_600_001),
    "lease a fraction": call("open", key=KEY, lease_ms=0.5),
    "lease huge": call("open", key=KEY, lease_ms=10**400),
    "lease true": call("open", key=KEY, lease_ms=True),
    "read of nothing": call("read", lease=99, start=0, nbytes=1),
    "read negative": call("read", lease=1, start=-1, nbytes=1),
    "read of zero": call("read", lease=1, start=0, nbytes=0),
    "read too much": call("read", lease=1, start=0, nbytes=2**60),
    "release a text": call("release", lease="1"),
    "put of nothing": call("put", left_ms=None),
    "put of zeros": call("put", bytes(4096), left_ms=None),
    "put of a pickle": call("put", pickle.dumps([1, 2, 3]), left_ms=None),
    "put with a clock": call("put", b"x", expires_s=1e18),
    "put ends before": call("put", b"x", left_ms=0),
    "begin of zero": call("begin", upload="0" * 32, nbytes=0, lease_ms=1, entry=False),
    "begin of a tebibyte": call("begin", upload="0" * 32, nbytes=2**40, lease_ms=1, entry=False),
    "begin of more": call("begin", upload="0" * 32, nbytes=2**41, lease_ms=1, entry=False),
    "begin as a path": call("begin", upload="../" * 10 + "ab", nbytes=1, lease_ms=1, entry=False),
    "part of nothing": call("part", b"abc", upload="0" * 32, part=0),
    "part negative": call("part", b"abc", upload="0" * 32, part=-1),
    "part far off": call("part", b"abc", upload="0" * 32, part=2**30),
    "commit of nothing": call("commit", upload="0" * 32, left_ms=None),
    "commit of a name": call("commit", upload="x" * 32, left_ms=None),
    "abort of nothing": call("abort", upload="0" * 32),
    "blob name a path": call("blob_read", fingerprint=MODEL, name="../../etc/passwd"),
    "blob name long": call("blob_read", fingerprint=MODEL, name="a" * 65),
    "blob of no model": call("blob_read", fingerprint="{}", name="offsets"),
    "blob of a list": call("blob_names", fingerprint="[]"),
    "blob written with nothing": call("blob_write", fingerprint=MODEL, name="a", upload="0" * 32, old=""),
    "group long": call("delete_group", group="a" * 257),
    "group a number": call("delete_group", group=1),
    "touch forever": call("touch", key=KEY, ttl_ms=2**60),
    "claim without lease": call("claim", key=KEY),
    "claim waits too long": call("claim", key=KEY, lease_ms=1, wait_ms=3_600_001),
    "claim waits never": call("claim", key=KEY, lease_ms=1),
    "sums of no node": call("sums_open", fingerprint=MODEL, template="all", node=""),
    "sums of a path": call("sums_open", fingerprint=MODEL, template="all", node="../x"),
    "sums of a long node": call("sums_open", fingerprint=MODEL, template="all", node="a" * 129),
    "sums of no template": call("sums_open", fingerprint=MODEL, template="", node="a"),
    "sums of no model": call("sums_open", fingerprint="{}", template="all", node="a"),
    "sums put with nothing": call(
        "sums_put", fingerprint=MODEL, template="all", node="a", epoch=1, sequence=1, upload="0" * 32
    ),
    "sums put at 0": call(
        "sums_put", fingerprint=MODEL, template="all", node="a", epoch=1, sequence=0, upload="0" * 32
    ),
    "sums of others with a payload": call(
        "sums_others", b"abc", fingerprint=MODEL, template="all", node="", epoch=0, known=""
    ),
    "sums known too long": call("sums_others", fingerprint=MODEL, template="all", node="", epoch=0, known="a" * 65),
    "sums of an epoch below 0": call("sums_others", fingerprint=MODEL, template="all", node="", epoch=-1, known=""),
    "sums forgotten of nobody": call("sums_forget", fingerprint=MODEL, template="all", agent=""),
    "sums retired of a list": call("sums_retire", fingerprint=MODEL, template="all", node=["a"]),
    "nearest without ids": call("nearest", fingerprint=MODEL, count=1, least=0.5, chosen=False),
    "nearest of half an id": call("nearest", b"abcde", fingerprint=MODEL, count=1, least=0.5, chosen=False),
    "nearest of none": call("nearest", b"abcd", fingerprint=MODEL, count=0, least=0.5, chosen=False),
    "nearest of too many": call("nearest", b"abcd", fingerprint=MODEL, count=65, least=0.5, chosen=False),
    "nearest of NaN": frame(
        header=json.dumps(
            {"call": "nearest", "fingerprint": MODEL, "count": 1, "least": float("nan"), "chosen": False}
        ).encode(),
        payload=b"abcd",
    ),
    "follow of no model": call("follow", fingerprint="[]", run="", since=0),
    "follow before 0": call("follow", fingerprint=MODEL, run="", since=-1),
    "follow of a long run": call("follow", fingerprint=MODEL, run="a" * 17, since=0),
    "half a character": frame(header=b'{"call":"delete_group","group":"\\ud800"}'),
    "unclaim by a number": call("unclaim", key=KEY, holder=1),
    "watch a text": call("watch", since="0"),
    "watch long ago": call("watch", since=-2),
    "number too big": frame(header=b'{"call":"watch","since":' + BIG.encode() + b"}"),
    "infinity": frame(header=b'{"call":"watch","since":Infinity}'),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    with service_here(tmp_path_factory.mktemp("frames")) as found:
        yield found


def connect(address: str, token: str = "one") -> tuple[Wire, socket.socket]:
    """A connection after its hello, and its bare socket."""
    wire = Address.parse(address).connect(Deadline(5.0))
    wire.send(Kind.REQUEST, 1, {"call": "hello", "token": token}, Deadline(5.0))
    wire.receive(Deadline(5.0))
    return wire, wire._sock


def test_there_are_enough() -> None:
    assert len(BROKEN_FRAMES) + len(REFUSED_CALLS) >= 80


@pytest.mark.parametrize("name", BROKEN_FRAMES)
def test_broken_frames_end_the_connection(served: tuple[Any, str], name: str) -> None:
    service, address = served
    wire, _ = connect(address)
    started = time.monotonic()
    wire.send_all([memoryview(BROKEN_FRAMES[name])], Deadline(5.0))
    preamble, header = wire.receive(Deadline(5.0))
    assert time.monotonic() - started < 1.0
    assert (preamble.kind, header["code"]) == (Kind.REFUSAL, "protocol")
    assert not wire.idle(5.0) or wire._sock.recv(1) == b""
    wire.close()
    alive(service, address)


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_refused_calls_leave_the_connection_usable(served: tuple[Any, str], name: str) -> None:
    service, address = served
    wire, _ = connect(address)
    wire.send_all([memoryview(REFUSED_CALLS[name])], Deadline(5.0))
    preamble, header = wire.receive(Deadline(5.0))
    assert preamble.kind is Kind.REFUSAL
    assert header["code"] in ("protocol", "invalid", "corrupt", "unavailable")
    assert "failed inside" not in str(header["message"])
    wire.send(Kind.REQUEST, 8, {"call": "stats"}, Deadline(5.0))
    assert wire.receive(Deadline(5.0))[0].number == 8
    wire.close()
    assert service.core.uploads.reserved() == (0, 0)


def alive(service: Any, address: str) -> None:
    wire, _ = connect(address)
    wire.send(Kind.REQUEST, 2, {"call": "stats"}, Deadline(5.0))
    assert wire.receive(Deadline(5.0))[0].kind is Kind.ANSWER
    wire.close()


@pytest.mark.parametrize(
    "first", [call("stats"), frame(header=b'{"call":"hello"}'), call("hello", token=1), b"\0" * 64]
)
def test_nothing_before_hello(served: tuple[Any, str], first: bytes) -> None:
    wire = Address.parse(served[1]).connect(Deadline(5.0))
    wire.send_all([memoryview(first)], Deadline(5.0))
    assert wire.receive(Deadline(5.0))[1]["code"] == "protocol"
    wire.close()


def test_an_entry_of_another_namespace_is_refused(served: tuple[Any, str]) -> None:
    service, address = served
    key, entry = sample(5, namespace=TWO)
    data = b"".join(b for part in EntryWriter(key, entry, "raw", 0.0, None) for b in part)
    wire, _ = connect(address, "one")
    wire.send_all([memoryview(call("put", data, left_ms=None))], Deadline(5.0))
    assert wire.receive(Deadline(5.0))[1]["code"] in ("corrupt", "denied")
    assert not holds(service.store, 5, TWO)
    wire.close()


def test_every_bit_of_a_put_counts(served: tuple[Any, str]) -> None:
    service, address = served
    key, entry = sample(6)
    whole = b"".join(b for part in EntryWriter(key, entry, "raw", 0.0, None) for b in part)
    wire, _ = connect(address, "one")
    for at in range(0, len(whole), 5):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        wire.send_all([memoryview(call("put", bytes(data), left_ms=None))], Deadline(5.0))
        preamble, header = wire.receive(Deadline(5.0))
        assert preamble.kind is Kind.REFUSAL, at
        assert header["code"] in ("corrupt", "invalid", "protocol"), at
    assert not holds(service.store, 6)
    wire.close()


def test_pack_and_unpack_agree_and_refuse_too_much() -> None:
    data = pack(Kind.REQUEST, 9, {"call": "x"}, [memoryview(b"abc"), memoryview(b"")], deadline_ms=5)
    preamble = unpack(data[:48])
    assert (preamble.kind, preamble.number, preamble.deadline_ms, preamble.payload_bytes) == (Kind.REQUEST, 9, 5, 3)
    assert open_header(data[:48], data[48:]) == {"call": "x"}
    for wrong in ({"a": "x" * 70000}, None):
        with pytest.raises(ProtocolError):
            pack(Kind.PART, 1, wrong, payload_bytes=0 if wrong else MAX_PART_BYTES + 1)


def test_the_token_decides_the_namespace(served: tuple[Any, str]) -> None:
    with RemoteStore(served[1], tokens={"one": "two"}) as store:
        with pytest.raises(Exception, match="token is for namespace two"):
            store.put(*sample(7))
