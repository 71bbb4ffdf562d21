"""The memory tier: the contract, and what is its own."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcomm.errors import DeadlineExceeded, StoreUnavailable
from kvcomm.store import Attributes, DiskStore, FrequencyRecency, LeastRecentlyUsed, MemoryStore, Priority, Store
from kvcomm.store.eviction import Candidate
from kvcomm.store.testing import ONE, TWO, StoreContract, holds, sample

SIZE = 2 * 2 * 2 * 3 * 4 * 4  # bytes of sample(n)'s KV


class TestMemoryStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MemoryStore(1 << 20)


def test_eviction_takes_the_oldest_of_the_lowest_class() -> None:
    store = MemoryStore(4 * SIZE, policy=LeastRecentlyUsed())
    for number, priority in enumerate((Priority.SYSTEM, Priority.HISTORY, Priority.TOOL, Priority.HISTORY)):
        store.put(*sample(number, attributes=Attributes(priority)))
    store.get(sample(1)[0])
    store.put(*sample(4))
    assert [holds(store, n) for n in range(5)] == [True, True, True, False, True]
    for number in range(5, 9):
        store.put(*sample(number))
    assert holds(store, 0)


def test_pinned_entries_stay_and_leases_end() -> None:
    store = MemoryStore(2 * SIZE)
    for number in range(2):
        store.put(*sample(number))
    first = store.get(sample(0)[0])
    second = store.get(sample(1)[0], lease_s=0.15)
    assert first is not None
    assert second is not None
    with pytest.raises(DeadlineExceeded):
        store.put(*sample(2), deadline_s=0.02)
    assert store.put(*sample(2), deadline_s=2).stored
    assert holds(store, 0)
    with pytest.raises(StoreUnavailable):
        second.read()


def test_deleted_while_pinned_is_freed_at_release_and_counted_until_then() -> None:
    store = MemoryStore(SIZE)
    store.put(*sample(0))
    handle = store.get(sample(0)[0])
    assert handle is not None
    store.delete(sample(0)[0])
    assert store.stats().nbytes == SIZE
    assert handle.read().nbytes == SIZE
    handle.release()
    assert store.put(*sample(1), deadline_s=0.1).stored
    assert store.stats().entries == 1


def test_a_lost_handle_unpins() -> None:
    store = MemoryStore(SIZE)
    store.put(*sample(0))
    store.get(sample(0)[0])
    assert store.put(*sample(1), deadline_s=0.1).stored


def test_fragmented_pool_takes_a_large_entry_in_pieces() -> None:
    store = MemoryStore(8 * SIZE)
    for number in range(8):
        store.put(*sample(number))
    for number in (1, 3, 5):
        store.delete(sample(number)[0])
    key, entry = sample(20, tokens=6)
    assert store.put(key, entry).stored
    assert holds(store, 20, tokens=6)
    assert holds(store, 0)
    assert store.stats().counters.get("evictions", 0) == 0


def test_too_large_is_said() -> None:
    with pytest.raises(StoreUnavailable, match="exceeds the limit"):
        MemoryStore(SIZE).put(*sample(0, tokens=9))


def test_entry_limit_and_fair_share() -> None:
    store = MemoryStore(1 << 20, max_entries=10)
    for number in range(4):
        store.put(*sample(number, namespace=TWO))
    for number in range(100):
        store.put(*sample(number, namespace=ONE))
        assert store.stats().entries <= 10
    assert all(holds(store, n, TWO) for n in range(4))


def test_demotion_hook_sees_each_evicted_entry() -> None:
    seen = []
    store = MemoryStore(2 * SIZE, on_evict=lambda handle: seen.append((handle.key, handle.read())))
    for number in range(5):
        store.put(*sample(number))
        time.sleep(0.001)
    assert [key for key, _ in seen] == [sample(n)[0] for n in range(3)]


@dataclass(frozen=True)
class StepsToNextUse:
    """A workflow's knowledge: what is needed last goes first."""

    steps: dict[str, int]
    depth: int = 1 << 20

    def rank(self, candidate: Candidate, now_s: float) -> float:
        return -self.steps[candidate.name]


def make_tier(tier: str, folder: Path, policy: StepsToNextUse) -> Store:
    if tier == "memory":
        return MemoryStore(5 * SIZE, policy=policy)
    return DiskStore(folder, max_entries=5, policy=policy)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_policy_that_knows_the_workflow(tmp_path: Path, tier: str) -> None:
    steps = {sample(n)[0].digest: n * 7 % 5 for n in range(5)}  # 0, 2, 4, 1, 3
    policy = StepsToNextUse(steps | {sample(9)[0].digest: 0})
    with make_tier(tier, tmp_path, policy) as store:
        for number in range(5):
            store.put(*sample(number))
        store.put(*sample(9))
        assert [holds(store, n) for n in range(5)] == [True, True, False, True, True]


def test_frequent_use_outlasts_a_scan() -> None:
    store = MemoryStore(10 * SIZE, policy=FrequencyRecency(doubling_s=3600))
    for _ in range(8):
        store.put(*sample(0))
        assert holds(store, 0)
    for number in range(1, 40):
        store.put(*sample(number))
    assert holds(store, 0)
