"""Manifest, catalogue and staging: what needs no cluster."""

import threading
from concurrent.futures import Future

import pytest
import torch

from kvcomm.errors import CorruptEntry, DeadlineExceeded
from kvcomm.store import Keyring, Priority
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import MemoryBlobs
from kvcomm.store.testing import ONE, TWO
from kvcomm.transfer import catalogue
from kvcomm.transfer.catalogue import _NOBODY, Catalogue, Row
from kvcomm.transfer.mooncake_manifest import Manifest, decode_manifest
from kvcomm.transfer.mooncake_staging import Slots

NAME, MIB = "ab" * 32, 1 << 20


@pytest.mark.parametrize("keyring", [None, Keyring(b"k" * 32)])
def test_manifest_comes_back_and_no_bit_of_it_can_change(keyring: Keyring | None) -> None:
    manifest = Manifest.new(9 * MIB, 4 * MIB, Priority.TOOL, 12.5)
    assert manifest.sizes == [4 * MIB, 4 * MIB, MIB]
    assert len(set(manifest.part_names("p/"))) == 3
    data = manifest.encode("one", NAME, keyring)
    assert decode_manifest(data, "one", NAME, keyring) == manifest
    for bit in range(0, 8 * len(data), 3):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptEntry):
            decode_manifest(bytes(changed), "one", NAME, keyring)
    for wrong in (data[:-1], data + b"0", b""):
        with pytest.raises(CorruptEntry):
            decode_manifest(wrong, "one", NAME, keyring)
    with pytest.raises(CorruptEntry):
        decode_manifest(data, "one", "cd" * 32, keyring)
    with pytest.raises(CorruptEntry):
        decode_manifest(data, "one", NAME, Keyring(b"x" * 32))


def row(number: int, tag: bytes = b"t" * 16, expires_s: float | None = None) -> Row:
    return Row(f"00{number:062x}", tag, 4 * MIB, MIB, expires_s, b"s" * (number % 7))


def test_catalogue_adds_replaces_renews_and_removes() -> None:
    rows, deadline = Catalogue(MemoryBlobs()), Deadline(60)
    assert rows.add(ONE, row(1, expires_s=5.0), deadline) == []
    assert rows.add(ONE, row(2), deadline) == []
    assert rows.add(ONE, row(2, b"u" * 16), deadline) == [row(2)]
    rows.renew(ONE, row(1).name, 9.0, deadline)
    rows.renew(ONE, row(2).name, 9.0, deadline)
    assert list(rows.rows(ONE)) == [row(1, expires_s=9.0), row(2, b"u" * 16)]
    assert list(rows.rows(TWO)) == []
    rows.remove(ONE, row(2).name, b"t" * 16, deadline)  # another put's
    assert len(list(rows.rows(ONE))) == 2
    rows.remove(ONE, row(2).name, b"u" * 16, deadline)
    assert [found.name for found in rows.rows(ONE)] == [row(1).name]


def test_the_oldest_row_of_a_full_shard_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MAX_ROWS", 8)
    rows, deadline = Catalogue(MemoryBlobs()), Deadline(600)
    for number in range(8):
        assert rows.add(ONE, row(number), deadline) == []
    assert rows.add(ONE, row(8), deadline) == [row(0)]
    assert len(list(rows.rows(ONE))) == 8


def test_a_broken_shard_is_an_empty_one() -> None:
    blobs = MemoryBlobs()
    rows, deadline = Catalogue(blobs), Deadline(60)
    rows.add(ONE, row(1), deadline)
    (name,) = blobs.names((ONE, _NOBODY))
    whole = blobs.read((ONE, _NOBODY), name)
    assert whole is not None
    for broken in (b"", whole[:-1], whole + b"x", b"x" + whole[1:], whole[:8] + b"\xff" * 4 + whole[12:]):
        blobs.write((ONE, _NOBODY), name, broken)
        assert list(rows.rows(ONE)) == []
    rows.add(ONE, row(2), deadline)
    assert list(rows.rows(ONE)) == [row(2)]


def test_slots_are_lent_by_halves_and_waited_for() -> None:
    slots = Slots(torch.zeros(64, dtype=torch.uint8), 16)
    with slots.lend(9, Deadline(1)) as first, slots.lend(9, Deadline(1)) as second:
        assert (len(first), len(second)) == (2, 2)
        first.view(0)[:] = b"a" * 16
        assert bytes(second.view(1)) == bytes(16)
        assert len({loan.address(i) for loan in (first, second) for i in (0, 1)}) == 4
        with pytest.raises(DeadlineExceeded), slots.lend(1, Deadline(0.02)):
            pass
    with slots.lend(1, Deadline(1)) as again:
        assert len(again) == 1


def test_slots_under_a_transfer_that_hangs_come_back_only_when_it_ends() -> None:
    slots = Slots(torch.zeros(32, dtype=torch.uint8), 16)
    hanging: Future[object] = Future()
    hanging.set_running_or_notify_cancel()
    with slots.lend(1, Deadline(1)) as loan:
        loan.watch(hanging)
        address = loan.address(0)
    with slots.lend(1, Deadline(1)) as other:
        assert other.address(0) != address
        with pytest.raises(DeadlineExceeded), slots.lend(1, Deadline(0.02)):
            pass
        threading.Timer(0.02, hanging.set_result, [None]).start()
        with slots.lend(1, Deadline(5)) as back:
            assert back.address(0) == address
