"""The n-th call of each file operation fails, for every n: success or a typed error, and the next put works."""

import errno
import sqlite3
from pathlib import Path

import pytest

from kvcomm.errors import StoreError, StoreUnavailable
from kvcomm.store import Attributes, DiskStore, Priority
from kvcomm.store.faults import OPERATIONS, FailNth, HookedFiles
from kvcomm.store.testing import ONE, holds, sample
from tests.faults.work import Ledger, work


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nth_call_fails(tmp_path: Path, operation: str, error: int, when: str, forever: bool) -> None:
    for nth in range(1, 200):
        hook = FailNth(operation, nth, error, when, forever)
        ledger = Ledger()
        folder = tmp_path / str(nth)
        work(folder, HookedFiles(hook), ledger.begin, ledger.done)
        if not hook.fired:
            assert nth > 1
            return
        ledger.check(folder)
    pytest.fail("the work never ended without a failure")


@pytest.mark.parametrize("operation", ["write", "fsync", "rename", "fsync_folder", "create"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_entry_whose_put_failed_is_never_served(tmp_path: Path, operation: str, error: int) -> None:
    hook = FailNth(operation, 10**9, error)
    with DiskStore(tmp_path, files=HookedFiles(hook)) as store:
        store.put(*sample(0))
        hook.nth = hook.seen + 1
        with pytest.raises(StoreUnavailable, match=str(error)):
            store.put(*sample(1))
        assert not holds(store, 1)
        assert not store.contains(sample(1)[0])
        with DiskStore(tmp_path) as other:
            assert not holds(other, 1)
        assert store.put(*sample(1)).stored
        assert holds(store, 1)
        assert holds(store, 0)


def test_fsync_and_unlink_failing_together_serve_nothing(tmp_path: Path) -> None:
    folder = FailNth("fsync_folder", 10**9, errno.EIO, forever=True)
    unlink = FailNth("unlink", 10**9, errno.EIO, forever=True)

    def hook(operation: str, when: str) -> None:
        folder(operation, when)
        unlink(operation, when)

    with DiskStore(tmp_path, files=HookedFiles(hook)) as store:
        store.put(*sample(0))
        folder.nth, unlink.nth = folder.seen + 1, unlink.seen + 1
        with pytest.raises(StoreError):
            store.put(*sample(1))
        assert not holds(store, 1)
        folder.nth = unlink.nth = 10**9
        assert store.put(*sample(1)).stored
        assert holds(store, 1)


def test_whole_but_not_counted_entry_of_a_crash_keeps_its_group(tmp_path: Path) -> None:
    """As after a kill between rename and the index: the row is reserved by a store that is gone."""
    with DiskStore(tmp_path) as store:
        for number in range(2):
            store.put(*sample(number, attributes=Attributes(Priority.TOOL, "t@1")))
    for dropped_at_once in (True, False):
        other = DiskStore(tmp_path) if dropped_at_once else None
        with sqlite3.connect(tmp_path / "index.sqlite") as side:
            side.execute("UPDATE entry SET owner = 'gone'")
        side.close()
        if other is not None:
            assert holds(other, 0)
            assert other.delete_group(ONE, "t@1") == 2
            assert not holds(other, 0)
            for number in range(2):
                other.put(*sample(number, attributes=Attributes(Priority.TOOL, "t@1")))
            other.close()
    with DiskStore(tmp_path) as store:
        assert holds(store, 0)
        assert store.delete_group(ONE, "t@1") == 2


def test_opened_on_a_full_disk_it_reads_and_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as store:
        store.put(*sample(0))
        store.put(*sample(1))
    connect = sqlite3.connect

    def full(path: Path, **options: object) -> sqlite3.Connection:
        db = connect(path, **options)  # type: ignore[call-overload]
        if str(path) != ":memory:":
            db.close()
            raise sqlite3.OperationalError("database or disk is full")
        return db  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with DiskStore(tmp_path) as store:
            assert holds(store, 0)
            assert store.stats().entries == 2
            with pytest.raises(StoreUnavailable, match="disk was full"):
                store.put(*sample(2))
            assert store.delete(sample(1)[0])
    with DiskStore(tmp_path) as store:
        assert holds(store, 0)
        assert not holds(store, 1)
        assert store.put(*sample(2)).stored


def test_failing_read_is_a_fault_and_not_a_loss(tmp_path: Path) -> None:
    hook = FailNth("readv", 10**9, errno.EIO)
    with DiskStore(tmp_path, files=HookedFiles(hook)) as store:
        store.put(*sample(0))
        hook.nth = hook.seen + 1
        with pytest.raises(StoreUnavailable):
            store.get(sample(0)[0])
        assert holds(store, 0)
