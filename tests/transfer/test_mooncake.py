"""MooncakeStore on a real master and node: the contract, and what is its own."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvcomm.errors import CorruptEntry, InvalidInput, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store import Attributes, Entry, Keyring, Priority, Store, empty_kv
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import MemoryBlobs
from kvcomm.store.codec import entry_name
from kvcomm.store.testing import ONE, TWO, StoreContract, fingerprint, holds, same, sample
from kvcomm.transfer.catalogue import _NOBODY
from kvcomm.transfer.mooncake import MooncakeStore
from kvcomm.transfer.mooncake_config import PLACING, MooncakeConfig, Placing
from kvcomm.transfer.mooncake_staging import Loan
from tests.transfer.mooncake_cluster import Cluster, private_network, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
RING = Keyring(b"k" * 32)
WIDE = fingerprint(8, 8, 64)  # 32 KiB a token


def deadline() -> Deadline:
    return Deadline(10)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with private_network(), Cluster(tmp_path_factory.mktemp("mooncake"), node_mib=256) as cluster:
        yield cluster


class TestMooncake(StoreContract):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def make_store(self, folder: Path) -> Store:
        return MooncakeStore(self.cluster.config())


class TestMooncakeSealed(TestMooncake):
    def make_store(self, folder: Path) -> Store:
        return MooncakeStore(self.cluster.config(), keyring=RING)


@pytest.mark.parametrize("keyring", [None, RING])
def test_values_larger_than_the_staging_memory(cluster: Cluster, keyring: Keyring | None) -> None:
    config = cluster.config(MooncakeConfig(staging_bytes=8 << 20))
    with MooncakeStore(config, keyring=keyring) as store:
        key, entry = sample(1, tokens=800, model=WIDE)  # 25 MiB, two slots of 4 MiB
        assert store.put(key, entry).stored
        out = empty_kv(key.fingerprint, 800)
        assert store.get_into(key, out) == entry.segment
        assert same(out, entry.kv)
        with store.get(key) as handle:
            assert same(handle.read(), entry.kv)
        assert store.delete(key)


def test_two_clients_share_values_and_with_the_blobs_the_catalogue(cluster: Cluster) -> None:
    config, blobs = cluster.config(), MemoryBlobs()
    with MooncakeStore(config, blobs=blobs) as first, MooncakeStore(config, blobs=blobs) as second:
        first.put(*sample(1, attributes=Attributes(Priority.TOOL, "t@1")))
        assert holds(second, 1)
        assert not second.put(*sample(1)).stored
        assert [e.attributes.group for e in second.entries(ONE)] == ["t@1"]
        assert second.delete_group(ONE, "t@1") == 1
        assert not holds(first, 1)


def test_a_missing_part_is_a_miss_and_can_be_put_again(cluster: Cluster) -> None:
    config = cluster.config()
    key, entry = sample(1, tokens=300, model=WIDE)
    with MooncakeStore(config) as store:
        store.put(key, entry)
        manifest = store._manifest(key, entry_name(key, None), deadline())
        assert manifest is not None
        names = manifest.part_names(config.prefix)
        assert len(names) > 1
        for read in (store.get, lambda k: store.get_into(k, empty_kv(k.fingerprint, 300))):
            assert store._engine.remove(names[1:2], deadline()) == [True]
            assert read(key) is None
            assert not store.contains(key)
            assert list(store.entries(ONE)) == []
            assert store.put(key, entry).stored
            manifest = store._manifest(key, entry_name(key, None), deadline())
            assert manifest is not None
            names = manifest.part_names(config.prefix)
        assert store.stats(ONE).counters["missing parts"] == 2


@pytest.mark.parametrize("keyring", [None, RING])
def test_changed_bytes_are_never_data(cluster: Cluster, keyring: Keyring | None) -> None:
    config = cluster.config()
    key, entry = sample(1, tokens=40, model=WIDE)
    with MooncakeStore(config, keyring=keyring) as store:
        name = entry_name(key, keyring)
        for at in (0, 50, 200, 5000, 700_000):
            store.put(key, entry)
            manifest = store._manifest(key, name, deadline())
            assert manifest is not None
            (part,), (size,) = manifest.part_names(config.prefix), manifest.sizes
            with store._engine.parts.lend(1, deadline()) as loan:
                store._engine.get_parts([part], loan, [size], deadline())
                loan.view(0)[at] ^= 1
                assert store._engine.remove([part], deadline()) == [True]
                store._engine.put_parts([part], loan, [size], Placing(), "changed", deadline())
            out = empty_kv(key.fingerprint, 40)
            with pytest.raises(CorruptEntry):
                store.get_into(key, out)
            assert store.get(key) is None
        store.put(key, entry)
        data = bytearray(store._engine.get_small(config.prefix + name, deadline()) or b"")
        data[20] ^= 1
        assert store._engine.remove([config.prefix + name], deadline()) == [True]
        store._engine.put_small(config.prefix + name, bytes(data), Placing(), "changed", deadline())
        with pytest.raises(CorruptEntry):
            store.get(key)
        assert store.get(key) is None


@pytest.mark.parametrize("keyring", [None, RING])
def test_memory_given_to_another_object_during_a_read_is_no_corruption(
    cluster: Cluster, keyring: Keyring | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, entry = sample(1, tokens=40, model=WIDE)
    with MooncakeStore(cluster.config(), keyring=keyring) as store:
        engine = store._engine
        get_small, get_parts = engine.get_small, engine.get_parts
        torn = {"manifest": 0, "parts": 0}

        def small(name: str, deadline: Deadline) -> bytes | None:
            data = get_small(name, deadline)
            torn["manifest"] += 1
            return bytes(100) if data and torn["manifest"] == 1 else data

        def parts(names: Sequence[str], loan: Loan, sizes: Sequence[int], deadline: Deadline) -> None:
            get_parts(names, loan, sizes, deadline)
            torn["parts"] += 1
            if torn["parts"] == 1:
                loan.view(0)[: sizes[0]] = bytes(sizes[0])

        monkeypatch.setattr(engine, "get_small", small)
        monkeypatch.setattr(engine, "get_parts", parts)
        store.put(key, entry)
        for read in (lambda: holds(store, 1, tokens=40, model=WIDE), lambda: read_into(store, key, entry)):
            torn.update(manifest=0, parts=0)
            assert read()
        assert not store.stats(ONE).counters.get("corrupt")


def read_into(store: Store, key: CacheKey, entry: Entry) -> bool:
    out = empty_kv(key.fingerprint, len(entry.segment))
    return store.get_into(key, out) == entry.segment and same(out, entry.kv)


def test_reading_beside_puts_and_deletes_is_right_or_a_miss(cluster: Cluster) -> None:
    """Removal frees memory under a reader: what it read then must be known as gone, not as corrupt."""
    with MooncakeStore(cluster.config()) as store:
        wrong: list[BaseException] = []
        ends = time.monotonic() + 8

        def change() -> None:
            while time.monotonic() < ends:
                for number in range(4):
                    with suppress(StoreUnavailable):  # deleted by the other while it was put
                        store.put(*sample(number, tokens=30))
                    store.delete(sample(number, tokens=30)[0])

        def read() -> None:
            while time.monotonic() < ends and not wrong:
                try:
                    for number in range(4):
                        holds(store, number, tokens=30)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for work in (change, change, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if wrong:
            raise wrong[0]
        assert not store.stats(ONE).counters.get("corrupt")


def test_a_sealed_value_tells_nothing_to_others_in_the_cluster(cluster: Cluster) -> None:
    config = cluster.config()
    key, entry = sample(1, tokens=40, model=WIDE)
    with MooncakeStore(config, keyring=RING) as store, MooncakeStore(config) as plain:
        store.put(key, entry)
        name = entry_name(key, RING)
        assert name not in (key.digest, entry_name(sample(1, tokens=40, model=WIDE, namespace=TWO)[0], RING))
        assert plain.get(key) is None  # another name
        with MooncakeStore(config, keyring=Keyring(b"x" * 32)) as stranger:
            assert stranger.get(key) is None
        manifest = store._manifest(key, name, deadline())
        assert manifest is not None
        with plain._engine.parts.lend(1, deadline()) as loan:
            plain._engine.get_parts(manifest.part_names(config.prefix), loan, manifest.sizes, deadline())
            seen = bytes(loan.view(0)[: manifest.nbytes])
        row = entry.kv.keys[0, 0, 0].numpy().tobytes()
        ids = torch.tensor(entry.segment.token_ids).to(torch.uint32).numpy().tobytes()
        assert not any(secret in seen for secret in (row, ids[:16], b"Test", ONE.name.encode() + b'"'))
        kept = b"".join(store.blobs.read((ONE, _NOBODY), n) or b"" for n in store.blobs.names((ONE, _NOBODY)))
        assert kept and b"Test" not in kept


def test_placing_by_priority_class(cluster: Cluster) -> None:
    for placing in (Placing(soft_pin=True, soft_pin_s=5), Placing(replicas=2), Placing(hard_pin=True)):
        config = cluster.config(
            MooncakeConfig(staging_bytes=16 << 20, placing=dict(PLACING) | {Priority.TOOL: placing})
        )
        with MooncakeStore(config) as store:
            store.put(*sample(1, attributes=Attributes(Priority.TOOL, ttl_s=60)))
            assert store.touch(sample(1)[0], ttl_s=120)
            assert holds(store, 1)
            assert store.delete(sample(1)[0])


def test_sweep_takes_out_what_is_gone(cluster: Cluster) -> None:
    config = cluster.config()
    with MooncakeStore(config) as store:
        for number in range(3):
            store.put(*sample(number))
        store._engine.remove([config.prefix + entry_name(sample(1)[0], None)], deadline())
        assert store.sweep(ONE) == 1
        assert {e.key for e in store.entries(ONE)} == {sample(0)[0], sample(2)[0]}


def test_handles_are_limited_and_lapse(cluster: Cluster) -> None:
    with MooncakeStore(cluster.config(), max_handles=1) as store:
        store.put(*sample(1))
        handle = store.get(sample(1)[0], lease_s=0.2)
        assert handle is not None
        with pytest.raises(StoreUnavailable, match="limit is 1"):
            store.get(sample(1)[0])
        time.sleep(0.25)
        with pytest.raises(StoreUnavailable):
            handle.read()
        assert holds(store, 1)


def test_wrong_configuration_is_refused() -> None:
    for wrong in ({"part_bytes": 1 << 20}, {"staging_bytes": 1}, {"threads": 0}, {"master": ""}, {"placing": {}}):
        with pytest.raises(InvalidInput):
            MooncakeConfig(**wrong)  # type: ignore[arg-type]
    for wrong in ({"replicas": 0}, {"soft_pin_s": 5.0}):
        with pytest.raises(InvalidInput):
            Placing(**wrong)  # type: ignore[arg-type]
