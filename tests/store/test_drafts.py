"""Files made ready: reused without anybody reading other bytes, never while they are read, bounded, gone at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvcomm.errors import CorruptEntry
from kvcomm.store import DiskStore, Entry
from kvcomm.store.codec import EntryWriter, entry_view
from kvcomm.store.disk_files import open_locked
from kvcomm.store.drafts import Draft, Drafts
from kvcomm.store.files import Files
from kvcomm.store.testing import fingerprint, same, sample

WIDE = fingerprint(16, 4, 64)
TOKENS = 48  # 1.5 MiB


def ready(store: DiskStore, nbytes: int) -> Draft:
    """A draft, after it was made in the background."""
    assert store.drafts is not None
    end = time.monotonic() + 20
    while time.monotonic() < end:
        draft = store.drafts.take(nbytes)
        if draft is not None:
            return draft
        time.sleep(0.005)
    raise AssertionError("no draft was made")


def adopt(store: DiskStore, number: int) -> tuple[Entry, bool]:
    """Write an entry into a draft as a service receives it, and adopt that."""
    key, entry = sample(number, tokens=TOKENS, model=WIDE)
    data = b"".join(b for part in EntryWriter(key, entry, "raw", time.time(), None) for b in part)
    draft = ready(store, len(data))
    draft.view[:] = data
    head, _ = entry_view(draft.view, key.namespace.name)
    stored = store.adopt(draft, head).stored
    assert store.drafts is not None
    if draft.adopted:
        store.drafts.let_go(draft)
    else:
        store.drafts.give_back(draft)
    return entry, stored


@pytest.mark.parametrize("durable", [True, False])
def test_an_adopted_draft_is_the_entry(tmp_path: Path, durable: bool) -> None:
    key = sample(1, tokens=TOKENS, model=WIDE)[0]
    with DiskStore(tmp_path, durable=durable, draft_bytes=16 << 20) as store:
        entry, stored = adopt(store, 1)
        assert stored
        assert not adopt(store, 1)[1]  # the first won
        handle = store.get(key)
        assert handle is not None
        with handle:
            assert same(handle.read(), entry.kv)
            assert store.stats().nbytes == handle.nbytes
    with DiskStore(tmp_path) as again:  # what was not adopted is gone, what was is there
        assert [p.name for p in (tmp_path / "tmp").iterdir()] == []
        handle = again.get(key)
        assert handle is not None
        with handle:
            assert same(handle.read(), entry.kv)


def test_a_deleted_file_is_used_again_unless_somebody_reads_it(tmp_path: Path) -> None:
    one, two, three = (sample(n, tokens=TOKENS, model=WIDE)[0] for n in (1, 2, 3))
    with DiskStore(tmp_path, durable=False, draft_bytes=16 << 20) as store:
        path = store._path(one, one.digest)
        first, _ = adopt(store, 1)
        number = os.lstat(path).st_ino
        reader = store.get(one)
        assert reader is not None
        assert store.delete(one)
        second, _ = adopt(store, 2)
        assert os.lstat(store._path(two, two.digest)).st_ino != number  # it was being read
        assert same(reader.read(), first.kv)
        reader.release()
        used = os.lstat(store._path(two, two.digest)).st_ino
        assert store.delete(two)
        assert store.drafts is not None
        end = time.monotonic() + 20
        while used not in {os.fstat(d.fd).st_ino for d in store.drafts._ready} and time.monotonic() < end:
            time.sleep(0.005)
        assert used in {os.fstat(d.fd).st_ino for d in store.drafts._ready}
        third, _ = adopt(store, 3)
        assert store.get(two) is None
        handle = store.get(three)
        assert handle is not None
        with handle:
            assert same(handle.read(), third.kv)


def test_a_name_that_means_another_file_by_now_is_a_miss(tmp_path: Path) -> None:
    class Slow(Files):
        def open(self, path: Path) -> int:
            fd = super().open(path)
            os.rename(path, tmp_path / "elsewhere")  # taken for a draft between opening and locking
            return fd

    (tmp_path / "entry").write_bytes(b"x")
    assert open_locked(Slow(), tmp_path / "entry", "entry") is None


def test_drafts_are_bounded_and_removed(tmp_path: Path) -> None:
    names = iter(range(1000))
    drafts = Drafts(Files(), lambda: tmp_path / str(next(names)), 4 << 20)
    assert drafts.take(100) is None  # small values need none
    assert drafts.take(64 << 20) is None
    held = []
    end = time.monotonic() + 20
    while len(held) < 3 and time.monotonic() < end:
        draft = drafts.take(1 << 20)
        held += [draft] if draft is not None else []
        time.sleep(0.002)
    for draft in held:
        drafts.give_back(draft)
    assert drafts.ready_bytes <= 4 << 20
    drafts.close()
    assert list(tmp_path.iterdir()) == []


def test_what_fails_its_check_is_not_adopted(tmp_path: Path) -> None:
    key, entry = sample(1, tokens=TOKENS, model=WIDE)
    data = bytearray(b"".join(b for part in EntryWriter(key, entry, "raw", time.time(), None) for b in part))
    data[-100] ^= 1
    with DiskStore(tmp_path, durable=False, draft_bytes=8 << 20) as store:
        draft = ready(store, len(data))
        draft.view[:] = data
        with pytest.raises(CorruptEntry):
            entry_view(draft.view, key.namespace.name)
        assert store.drafts is not None
        store.drafts.give_back(draft)
        assert store.get(key) is None
