"""Stores made of stores: the contract for each composition, movement between tiers, faults, dropping, single flight."""

import asyncio
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.errors import DeadlineExceeded, InvalidInput, StoreUnavailable
from kvcomm.store import (
    AsyncStore,
    Attributes,
    DiskStore,
    Entry,
    Keyring,
    LeastRecentlyUsed,
    MemoryStore,
    Priority,
    Promotion,
    Selective,
    Store,
    TieredStore,
    WriteBack,
    shared_memory_store,
)
from kvcomm.store.faults import FailNth, HookedFiles
from kvcomm.store.testing import ONE, TWO, StoreContract, empty_kv, holds, same, sample

SIZE = 2 * 2 * 2 * 3 * 4 * 4


def two(folder: Path, memory_bytes: int = 1 << 20, **options: object) -> TieredStore:
    return TieredStore([MemoryStore(memory_bytes, policy=LeastRecentlyUsed()), DiskStore(folder)], **options)  # type: ignore[arg-type]


class TestWriteThrough(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return two(folder)


class TestWriteBack(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return two(folder, placement=WriteBack())


class TestSelective(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return two(folder, placement=Selective())


class TestThreeTiersSealedTinyMemory(StoreContract):
    def make_store(self, folder: Path) -> Store:
        lowest = DiskStore(folder, keyring=Keyring(b"k" * 32))
        return TieredStore([MemoryStore(2048, device="cpu", name="device"), MemoryStore(4096), lowest])


class TestTierOfTiers(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return TieredStore([MemoryStore(1 << 16, name="device"), two(folder, placement=WriteBack())])


class TestShared(StoreContract):
    def make_store(self, folder: Path) -> Store:
        folder.mkdir(parents=True)
        return shared_memory_store("test", 1 << 22, root=folder)


def test_shared_memory_is_one_store_for_two_openers(tmp_path: Path) -> None:
    with shared_memory_store("x", 1 << 20, root=tmp_path) as one:
        one.put(*sample(1))
        with shared_memory_store("x", 1 << 20, root=tmp_path) as other:
            assert holds(other, 1)
    with pytest.raises(InvalidInput):
        shared_memory_store("../x", 1 << 20, root=tmp_path)


def test_hot_entries_move_up(tmp_path: Path) -> None:
    with two(tmp_path) as first:
        first.put(*sample(0))
        first.put(*sample(1, attributes=Attributes(Priority.SYSTEM)))
    with two(tmp_path, promotion=Promotion(min_hits=3)) as store:
        memory = store.tiers[0]
        for turn in range(3):
            assert memory.contains(sample(0)[0]) == (turn > 2)
            assert holds(store, 0)
        assert memory.contains(sample(0)[0])
        assert holds(store, 1)
        assert memory.contains(sample(1)[0])
        counters = store.stats().counters
        assert (counters["hits.disk"], counters["promotions"]) == (4, 2)
        assert holds(store, 0)
        assert store.stats().counters["hits.memory"] == 1


def test_cold_entries_move_down_and_nothing_is_lost(tmp_path: Path) -> None:
    with two(tmp_path, 3 * SIZE, placement=Selective()) as store:
        for number in range(20):
            assert not store.put(*sample(number)).durable
            assert store.tiers[0].stats().entries <= 3
        assert store.stats().counters["demotions"] == 17
        assert all(holds(store, n) for n in range(20))
        assert store.put(*sample(50, attributes=Attributes(Priority.TOOL))).durable


def test_write_back_is_durable_after_flush(tmp_path: Path) -> None:
    with two(tmp_path, placement=WriteBack()) as store:
        for number in range(10):
            assert not store.put(*sample(number)).durable
        store.flush()
        assert store.tiers[1].stats().entries == 10
    with two(tmp_path) as store:
        assert all(holds(store, n) for n in range(10))


def test_write_back_beyond_its_bound_writes_itself(tmp_path: Path) -> None:
    with two(tmp_path, placement=WriteBack(), max_behind_bytes=1) as store:
        store.put(*sample(0))
        assert store.tiers[1].contains(sample(0)[0])


def test_time_to_live_is_not_longer_after_promotion(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as disk:
        disk.put(*sample(0, attributes=Attributes(Priority.SYSTEM, ttl_s=0.3)))
    with two(tmp_path) as store:
        time.sleep(0.15)
        assert holds(store, 0)
        assert store.tiers[0].contains(sample(0)[0])
        time.sleep(0.2)
        assert not holds(store, 0)


def failing(folder: Path, operation: str) -> tuple[TieredStore, FailNth]:
    hook = FailNth(operation, 10**9, errno.EIO, forever=True)
    store = TieredStore([MemoryStore(1 << 16), DiskStore(folder, files=HookedFiles(hook))])
    return store, hook


def test_fault_below_costs_time_only(tmp_path: Path) -> None:
    store, hook = failing(tmp_path, "write")
    hook.nth = hook.seen + 1
    receipt = store.put(*sample(0))
    assert (receipt.stored, receipt.durable) == (True, False)
    assert holds(store, 0)
    assert store.stats().counters["faults.disk.StoreUnavailable"] == 1
    hook.nth = 10**9
    changed = Entry(sample(0)[1].segment, sample(1)[1].kv)
    assert not store.put(sample(0)[0], changed).stored
    assert holds(store.tiers[1], 0)
    store.close()


def test_fault_is_not_taken_for_a_miss(tmp_path: Path) -> None:
    store, hook = failing(tmp_path, "open")
    store.put(*sample(0))
    store.tiers[0].delete(sample(0)[0])
    hook.nth = hook.seen + 1
    with pytest.raises(StoreUnavailable):
        store.get(sample(0)[0])
    hook.nth = 10**9
    assert holds(store, 0)
    store.close()


def test_dropped_group_is_gone_everywhere_while_others_put_and_get(tmp_path: Path) -> None:
    dropped: list[tuple[str, str]] = []
    store = two(tmp_path, 8 * SIZE, placement=WriteBack(), promotion=Promotion(1),
                on_drop=[lambda ns, group: dropped.append((ns.name, group))])  # fmt: skip
    stop = threading.Event()
    wrong: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                for number in range(20, 30):
                    holds(store, number)
                    store.put(*sample(number, attributes=Attributes(group="keep")))
                for number in range(10):
                    holds(store, number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for number in range(10):
        store.put(*sample(number, attributes=Attributes(Priority.TOOL, "search@1")))
    store.flush()  # what is counted below is what the disk holds
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert store.delete_group(ONE, "search@1") == 10
    for _ in range(3):
        assert not any(tier.contains(sample(n)[0]) for n in range(10) for tier in store.tiers)
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert dropped == [("one", "search@1")]
    store.close()


def test_single_flight_on_a_miss(tmp_path: Path) -> None:
    computed = []
    with two(tmp_path) as store:
        key, entry = sample(0)

        def compute() -> Entry:
            computed.append(threading.get_ident())
            time.sleep(0.05)
            return entry

        found = []

        def ask() -> None:
            with store.get_or_compute(key, compute) as handle:
                found.append(handle.read())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(computed) == 1
        assert len(found) == 8
        assert all(same(kv, entry.kv) for kv in found)
        with pytest.raises(ValueError, match="no"):
            store.get_or_compute(sample(1)[0], lambda: int("no"))  # type: ignore[arg-type,return-value]
        assert store.get_or_compute(*sample_lambda(1)).segment == sample(1)[1].segment


def sample_lambda(number: int) -> tuple:  # type: ignore[type-arg]
    key, entry = sample(number)
    return key, lambda: entry


def test_waiting_for_another_flight_has_a_deadline(tmp_path: Path) -> None:
    with two(tmp_path) as store:
        key, entry = sample(0)
        started = threading.Event()

        def slow() -> Entry:
            started.set()
            time.sleep(0.3)
            return entry

        thread = threading.Thread(target=lambda: store.get_or_compute(key, slow).release())
        thread.start()
        started.wait()
        with pytest.raises(DeadlineExceeded):
            store.get_or_compute(key, slow, deadline_s=0.05)
        thread.join()


def test_threads_end_with_the_store(tmp_path: Path) -> None:
    before = threading.active_count()
    with two(tmp_path, placement=WriteBack()) as store:
        store.put(*sample(0))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_asyncio_front(tmp_path: Path) -> None:
    async def use(store: Store) -> None:
        front = AsyncStore(store, threads=2)
        await asyncio.gather(*(front.put(*sample(n)) for n in range(6)))
        out = empty_kv(sample(0)[0].fingerprint, 3)
        assert await front.get_into(sample(3)[0], out) == sample(3)[1].segment
        assert same(out, sample(3)[1].kv)
        handle = await front.get(sample(9)[0])
        assert handle is None
        assert await front.contains(sample(1)[0])
        assert await front.delete(sample(1)[0])
        assert await front.delete_group(ONE, "x") == 0
        await front.flush()
        assert await front.delete_namespace(TWO) == 0
        await front.close()

    with two(tmp_path) as store:
        asyncio.run(use(store))


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
