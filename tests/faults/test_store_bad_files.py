"""What may lie in an entry's place and is not the entry: all found, none served, set aside, no hang."""

import os
import random
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm.errors import CorruptEntry, StoreUnavailable
from kvcomm.store import DiskStore, Keyring
from kvcomm.store.testing import holds, sample

KEYRINGS = [None, Keyring(b"k" * 32)]


def path_of(store: DiskStore, root: Path, number: int, tokens: int = 3) -> Path:
    before = {p for p in (root / "entries").rglob("*") if p.is_file()}
    store.put(*sample(number, tokens=tokens))
    (path,) = {p for p in (root / "entries").rglob("*") if p.is_file()} - before
    return path


def found_bad(store: DiskStore, number: int, tokens: int = 3) -> None:
    """One typed error, then a miss, then a put that works."""
    with pytest.raises(CorruptEntry):
        holds(store, number, tokens=tokens)
    assert not holds(store, number, tokens=tokens)
    assert not store.contains(sample(number, tokens=tokens)[0])
    assert store.put(*sample(number, tokens=tokens)).stored
    assert holds(store, number, tokens=tokens)


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_a_thousand_flipped_payload_bits(tmp_path: Path, keyring: Keyring | None) -> None:
    chance = random.Random(3)
    with DiskStore(tmp_path, keyring=keyring, durable=False) as store:
        path = path_of(store, tmp_path, 1, 40)
        good = path.read_bytes()
        for _ in range(1000):
            bad = bytearray(good)
            bit = chance.randrange(1024 * 8, len(bad) * 8)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            with pytest.raises(CorruptEntry):
                holds(store, 1, tokens=40)
            assert not holds(store, 1, tokens=40)
        assert store.stats().counters["corrupt"] == 1000
        assert len(list((tmp_path / "aside").iterdir())) == 16


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_every_header_byte_in_the_file(tmp_path: Path, keyring: Keyring | None) -> None:
    with DiskStore(tmp_path, keyring=keyring, durable=False) as store:
        path = path_of(store, tmp_path, 1)
        good = path.read_bytes()
        for at in range(1024):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
            with pytest.raises(CorruptEntry):
                holds(store, 1)


@pytest.mark.parametrize("keyring", KEYRINGS)
@pytest.mark.parametrize(
    "change",
    [
        lambda b: b"", lambda b: b[:50], lambda b: b[:112], lambda b: b[:700], lambda b: b[:-1], lambda b: b + b"\0",
        lambda b: b + b, lambda b: bytes(len(b)), lambda b: b"\x80\x04" + b,
    ],
)  # fmt: skip
def test_cut_and_extended(tmp_path: Path, keyring: Keyring | None, change: Callable[[bytes], bytes]) -> None:
    with DiskStore(tmp_path, keyring=keyring) as store:
        path = path_of(store, tmp_path, 1)
        path.write_bytes(change(path.read_bytes()))
        found_bad(store, 1)


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_two_files_exchanged(tmp_path: Path, keyring: Keyring | None) -> None:
    with DiskStore(tmp_path, keyring=keyring) as store:
        one, two = (path_of(store, tmp_path, n) for n in (1, 2))
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        found_bad(store, 1)
        found_bad(store, 2)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


@pytest.mark.parametrize(
    "make",
    [make_folder, os.mkfifo, make_socket, lambda p: os.symlink("/etc/passwd", p), lambda p: os.symlink(p, p)],
    ids=["folder", "fifo", "socket", "link", "loop"],
)  # fmt: skip
@pytest.mark.parametrize("when", ["open", "reopened", "index lost"])
def test_no_file_in_its_place(tmp_path: Path, make: Callable[[Path], None], when: str) -> None:
    here = Path.cwd()
    start = time.monotonic()
    store = DiskStore(tmp_path / "s")
    path = path_of(store, tmp_path / "s", 1)
    path.unlink()
    try:
        make(path)
    finally:
        os.chdir(here)
    if when == "open":
        found_bad(store, 1)
    else:
        store.close()
        if when == "index lost":
            for index in (tmp_path / "s").glob("index.sqlite*"):
                index.unlink()
        store = DiskStore(tmp_path / "s")
        assert list(store.upkeep.verify()) == []
        assert store.stats().counters["corrupt"] == 1
        assert not holds(store, 1)
        assert store.put(*sample(1)).stored
    assert holds(store, 1)
    store.close()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"SQLite format 3\0" + b"x" * 5000])
def test_broken_index_is_made_again(tmp_path: Path, content: bytes) -> None:
    with DiskStore(tmp_path) as store:
        store.put(*sample(1))
    (tmp_path / "index.sqlite").write_bytes(content)
    with DiskStore(tmp_path) as store:
        assert holds(store, 1)
        assert store.stats().entries == 1


def test_broken_index_is_left_alone_while_others_use_the_folder(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(*sample(1))
        with sqlite3.connect(tmp_path / "index.sqlite") as side:
            side.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        side.close()
        (tmp_path / "index.sqlite").write_bytes(b"x" * 5000)
        with pytest.raises(StoreUnavailable, match="close every other process"):
            DiskStore(tmp_path, deadline_s=0.5)
        assert holds(store, 1)
    with DiskStore(tmp_path) as store:
        assert holds(store, 1)
        assert store.contains(sample(1)[0])


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_bad_blobs(tmp_path: Path, keyring: Keyring | None) -> None:
    from tests.faults.work import OWNER

    with DiskStore(tmp_path, keyring=keyring) as store:
        store.blobs.write(OWNER, "a", b"x" * 50)
        store.blobs.write(OWNER, "b", b"y" * 50)
        first, second = sorted((tmp_path / "blobs").rglob("*.kvs"))
        good = first.read_bytes()
        changes = [good[:-1], good + b"\0", b"", good[:40], second.read_bytes()]
        changes += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
        for bad in changes:
            first.write_bytes(bad)
            with pytest.raises(CorruptEntry):
                store.blobs.read(OWNER, "a")
            assert store.blobs.read(OWNER, "a") is None
        first.write_bytes(b"bad")
        store.blobs.update(OWNER, "a", lambda old: b"new" if old is None else b"old")
        assert store.blobs.read(OWNER, "a") == b"new"
