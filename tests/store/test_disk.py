"""The disk tier: the contract in four forms, and what is its own."""

import os
import stat
import time
from pathlib import Path

import pytest

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.store import Attributes, DiskStore, Keyring, Priority, Quota, Store, empty_kv
from kvcomm.store.testing import ONE, TWO, StoreContract, fingerprint, holds, sample


class TestDiskStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder)


class TestSealed(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder, keyring=Keyring(b"k" * 32))


class TestNotDurable(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder, durable=False)


class TestInt8(StoreContract):
    lossless = False

    def make_store(self, folder: Path) -> Store:
        return DiskStore(folder, encoding="int8")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("keyring", [None, Keyring(b"k" * 32)])
def test_dtypes(tmp_path: Path, dtype: str, keyring: Keyring | None) -> None:
    with DiskStore(tmp_path, keyring=keyring) as store:
        key, entry = sample(1, tokens=7, model=fingerprint(3, 1, 5, dtype))
        store.put(key, entry)
        out = empty_kv(key.fingerprint, 7)
        assert store.get_into(key, out) == entry.segment
        assert out.keys.equal(entry.kv.keys)


@pytest.mark.parametrize(("encoding", "bound"), [("int8", 0.01), ("fp8", 0.04)])
def test_lossy_encodings_are_close_and_named(tmp_path: Path, encoding: str, bound: float) -> None:
    key, entry = sample(1, tokens=64, model=fingerprint(2, 2, 64))
    with DiskStore(tmp_path, encoding=encoding) as store:
        store.put(key, entry)
        handle = store.get(key)
        assert handle is not None
        assert handle.encoding == encoding
        error = (handle.read().keys - entry.kv.keys).norm() / entry.kv.keys.norm()
        assert 0 < float(error) < bound
        assert handle.nbytes < 0.3 * entry.kv.nbytes + 4096


def test_reopening_finds_everything(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for number in range(5):
            store.put(*sample(number, attributes=Attributes(Priority.TOOL, "t@1")))
        store.blobs.write((ONE, fingerprint()), "offsets", b"x")
    for lost in (False, True):
        if lost:
            for path in tmp_path.glob("index.sqlite*"):
                path.unlink()
        with DiskStore(tmp_path) as store:
            assert all(holds(store, n) for n in range(5))
            assert store.stats().entries == 5
            assert {e.attributes.group for e in store.entries()} == {"t@1"}
            assert store.blobs.read((ONE, fingerprint()), "offsets") == b"x"
    with DiskStore(tmp_path) as store:
        assert store.delete_group(ONE, "t@1") == 5


def test_modes(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "s") as store:
        store.put(*sample(0))
        store.blobs.write((ONE, fingerprint()), "offsets", b"x")
        for top, folders, names in os.walk(tmp_path / "s"):
            for name in (".", *folders):
                assert stat.S_IMODE(os.stat(f"{top}/{name}").st_mode) == 0o700, (top, name)
            for name in names:
                assert stat.S_IMODE(os.stat(f"{top}/{name}").st_mode) == 0o600, (top, name)


def test_limits_and_shares(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_entries=10, durable=False, quotas={"two": Quota(max_entries=3)}) as store:
        for number in range(6):
            store.put(*sample(number, namespace=TWO))
            assert store.stats(TWO).entries <= 3
        for number in range(40):
            store.put(*sample(number))
            assert store.stats().entries <= 10
        assert all(holds(store, n, TWO) for n in range(3, 6))
        assert store.upkeep.count() == 10


def test_another_store_respects_pins_until_the_lease_ends(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_entries=1) as first, DiskStore(tmp_path, max_entries=1) as second:
        first.put(*sample(0))
        handle = first.get(sample(0)[0], lease_s=0.2)
        assert handle is not None
        with pytest.raises(StoreUnavailable):
            second.put(*sample(1))
        time.sleep(0.41)
        assert second.put(*sample(1)).stored


def test_handles_are_limited(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_handles=2) as store:
        store.put(*sample(0))
        held = [store.get(sample(0)[0]) for _ in range(2)]
        with pytest.raises(StoreUnavailable, match="limit is 2"):
            store.get(sample(0)[0])
        for handle in held:
            assert handle is not None
            handle.release()
        assert holds(store, 0)


def test_keyring_must_fit(tmp_path: Path) -> None:
    DiskStore(tmp_path / "sealed", keyring=Keyring(b"k" * 32)).close()
    DiskStore(tmp_path / "plain").close()
    for folder, keyring in (("sealed", None), ("sealed", Keyring(b"x" * 32)), ("plain", Keyring(b"k" * 32))):
        with pytest.raises(InvalidInput):
            DiskStore(tmp_path / folder, keyring=keyring)
