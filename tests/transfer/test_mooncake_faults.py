"""What a Mooncake cluster loses, and that nothing of it is ever wrong: nodes, masters and memory that go away."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.errors import StoreUnavailable
from kvcomm.store import Attributes, Priority, Store
from kvcomm.store.testing import TWO, fingerprint, holds, sample
from kvcomm.transfer.mooncake import MooncakeStore
from kvcomm.transfer.mooncake_config import MooncakeConfig, Placing
from tests.transfer.mooncake_cluster import Cluster, eventually, private_network, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
BIG = fingerprint(8, 8, 64)  # 32 KiB a token
TWICE = Placing(replicas=2)
CONFIG = MooncakeConfig(staging_bytes=16 << 20, placing=dict.fromkeys(Priority, TWICE))


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with private_network():
        yield


def held(store: Store, numbers: range) -> int:
    """How many are read whole; a tier that cannot answer counts as none. AssertionError if other bytes are given."""
    count = 0
    for number in numbers:
        try:
            count += holds(store, number)
        except StoreUnavailable:
            continue
    return count


def test_a_node_killed_with_two_replicas(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--client_ttl=5", nodes=3) as cluster, MooncakeStore(cluster.config(CONFIG)) as store:
        for number in range(10):
            assert store.put(*sample(number)).stored
        cluster.kill(cluster.nodes[0])
        took = eventually(lambda: held(store, range(10)) == 10, 15)
        print(f"two replicas, a node killed: 10 of 10 after {took:.1f} s")
        assert store.put(*sample(11)).stored
        assert holds(store, 11)


def test_a_node_killed_with_one_replica_loses_its_share_and_no_more(tmp_path: Path) -> None:
    once = MooncakeConfig(staging_bytes=16 << 20, placing=dict.fromkeys(Priority, Placing()))
    with Cluster(tmp_path, "--client_ttl=5", nodes=2) as cluster, MooncakeStore(cluster.config(once)) as store:
        for number in range(20):
            assert store.put(*sample(number)).stored
        cluster.kill(cluster.nodes[0])
        time.sleep(10)
        left = held(store, range(20))
        print(f"one replica, a node of two killed: {left} of 20")
        assert left < 20
        for number in range(20):
            store.put(*sample(number))  # what is lost is a miss, and can be put again
        assert held(store, range(20)) == 20


def test_a_master_restarted_forgets_and_is_used_again(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, MooncakeStore(cluster.config()) as store:
        for number in range(5):
            store.put(*sample(number))
        cluster.kill(cluster.masters[0])
        for call in (lambda: store.get(sample(0)[0], deadline_s=1), lambda: store.put(*sample(9), deadline_s=1)):
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            assert time.monotonic() - start < 3
        cluster.start_master()

        def works() -> bool:
            try:
                store.put(*sample(20))
                return holds(store, 20)
            except StoreUnavailable:
                return False

        took = eventually(works, 30)
        print(f"a master restarted: put and read again after {took:.1f} s, {held(store, range(5))} of 5 survive")
        for number in range(5):
            store.put(*sample(number))
        assert held(store, range(5)) == 5


def test_the_second_master_takes_over(tmp_path: Path) -> None:
    import shutil

    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian's etcd-server)")
    with Cluster(tmp_path, nodes=2, ha=True) as cluster, MooncakeStore(cluster.config(CONFIG)) as store:
        for number in range(10):
            assert store.put(*sample(number)).stored
        time.sleep(2)  # the operation log reaches the one that stands by
        cluster.kill(cluster.masters[0])
        found: list[int] = []

        def answers() -> bool:
            try:
                store.put(*sample(99))
            except StoreUnavailable:
                return False
            found.append(held(store, range(10)))
            return holds(store, 99)

        took = eventually(answers, 30)
        print(f"fail-over with etcd after {took:.1f} s, {found[-1]} of 10 survive")


def test_a_pool_of_half_the_working_set(tmp_path: Path) -> None:
    chance, longest, deadline_s = random.Random(1), 0.0, 5.0
    counts = {"stored": 0, "existed": 0, "refused": 0, "hits": 0, "misses": 0, "unavailable": 0}
    with Cluster(tmp_path, node_mib=64) as cluster, MooncakeStore(cluster.config()) as store:
        for _ in range(120):
            number = chance.randrange(32)  # 32 values of 4 MiB and a little, in two parts
            key, entry = sample(number, tokens=128, model=BIG, attributes=Attributes(Priority(number % 4)))
            start = time.monotonic()
            try:
                handle = store.get(key, deadline_s=deadline_s)
                counts["misses" if handle is None else "hits"] += 1
                if handle is not None:
                    with handle:
                        kv = handle.read()
                        assert kv.keys.equal(entry.kv.keys) and kv.values.equal(entry.kv.values)
            except StoreUnavailable:
                handle = None
                counts["unavailable"] += 1
            longest = max(longest, time.monotonic() - start)
            if handle is None:
                start = time.monotonic()
                try:
                    done = store.put(key, entry, deadline_s=deadline_s)
                    counts["stored" if done.stored else "existed"] += 1
                except StoreUnavailable:
                    counts["refused"] += 1
                longest = max(longest, time.monotonic() - start)
    print(f"a pool of half the working set: {counts}, longest call {longest:.2f} s")
    assert longest < deadline_s + 1.5
    assert counts["hits"] > 0
    assert counts["stored"] > 16


def test_no_foreign_hit(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, MooncakeStore(cluster.config()) as store:
        for number in range(100):
            store.put(*sample(number))
        assert not any(holds(store, number, TWO) for number in range(100))
        assert held(store, range(100)) == 100
        assert list(store.entries(TWO)) == []
        assert store.stats(TWO).counters["misses"] == 100
