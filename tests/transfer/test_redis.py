"""RedisStore keeps the store's contract on a real server: plain, sealed, over TLS as a bound user, in a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvcomm.errors import InvalidInput
from kvcomm.store import Keyring, Store, empty_kv
from kvcomm.store.base import Attributes
from kvcomm.store.testing import ONE, StoreContract, fingerprint, same, sample
from kvcomm.transfer.redis import RedisStore
from tests.redis_server import RedisServer, free_port, needs_redis

WIDE = fingerprint(8, 4, 64)  # 16 KiB a token in float32
SMALL_PARTS = 64 << 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    running = RedisServer(tmp_path / "redis")
    yield running
    running.stop()


class TestPlain(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, server: RedisServer) -> None:
        self.server = server

    def make_store(self, folder: Path) -> Store:
        return RedisStore(self.server.address)


class TestSealed(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, server: RedisServer) -> None:
        self.server = server

    def make_store(self, folder: Path) -> Store:
        pytest.importorskip("cryptography", reason="sealing needs cryptography; pip install kvcomm[crypto]")
        return RedisStore(self.server.address, keyring=Keyring(b"k" * 32), part_bytes=SMALL_PARTS)


def test_arguments_are_checked_and_nothing_is_contacted() -> None:
    needs_redis()
    for bad in ({"part_bytes": 1000}, {"part_bytes": 1 << 30}, {"prefix": "a:b"}, {"prefix": ""}, {"encoding": "x"}):
        with pytest.raises(InvalidInput):
            RedisStore("127.0.0.1:1", **bad)  # type: ignore[arg-type]
    RedisStore("127.0.0.1:1").close()


def test_lossy_encoding_says_so(server: RedisServer) -> None:
    with RedisStore(server.address, encoding="int8") as store:
        key, entry = sample(1, tokens=64, model=WIDE)
        store.put(key, entry)
        handle = store.get(key)
        assert handle is not None
        with handle:
            assert handle.encoding == "int8"
            assert torch.allclose(handle.read().keys, entry.kv.keys, atol=0.05)
        assert store.stats().nbytes < entry.kv.nbytes / 2


def test_other_prefix_and_other_part_size(server: RedisServer) -> None:
    """Another prefix is another store; another part size reads what is there."""
    key, entry = sample(1, tokens=30, model=WIDE)
    with (
        RedisStore(server.address, part_bytes=SMALL_PARTS) as one,
        RedisStore(server.address) as large,
        RedisStore(server.address, prefix="other") as other,
    ):
        one.put(key, entry)
        assert other.get(key) is None
        out = empty_kv(WIDE, 30)
        assert large.get_into(key, out) == entry.segment
        assert same(out, entry.kv)
        assert not large.put(key, entry).stored


def test_long_header_is_listed(server: RedisServer) -> None:
    """A header past the first read's 4 KiB."""
    from dataclasses import replace

    from kvcomm.keys import Recipe

    with RedisStore(server.address) as store:
        key, entry = sample(1)
        key = replace(key, recipe=Recipe("prompt", "agent/" + "x" * 9000, "p", False))
        store.put(key, entry)
        assert [each.key for each in store.entries()] == [key]
        handle = store.get(key)
        assert handle is not None
        assert same(handle.read(), entry.kv)


def test_time_to_live_reaches_every_key(server: RedisServer) -> None:
    """Nothing of an entry with an end stays for ever."""
    from kvcomm.store.base import Deadline

    with RedisStore(server.address, part_bytes=SMALL_PARTS) as store:
        store.put(*sample(1, tokens=30, model=WIDE, attributes=Attributes(ttl_s=100)))
        left = store._calls.run(
            "in a test", lambda client: [client.ttl(key) for key in client.scan_iter()], Deadline(10)
        )  # fmt: skip
        assert len(left) > 3
        assert all(90 <= each <= 131 for each in left)


@pytest.mark.parametrize("spread", [False, True])
def test_cluster_of_three(tmp_path: Path, spread: bool) -> None:
    """Three masters: an entry is found from any of them, on one node or on several."""
    needs_redis()
    from kvcomm.store.base import Deadline
    from kvcomm.transfer.redis_connection import Server

    with cluster(tmp_path) as servers:
        known = Server(servers[0].address, cluster=True)
        with RedisStore(known, part_bytes=SMALL_PARTS, spread=spread) as store:
            for number in range(6):
                assert store.put(*sample(number, tokens=30, model=WIDE)).stored
            for number in range(6):
                key, entry = sample(number, tokens=30, model=WIDE)
                out = empty_kv(WIDE, 30)
                assert store.get_into(key, out) == entry.segment
                assert same(out, entry.kv)
            assert store.stats(ONE).entries == 6
            key = sample(0, tokens=30, model=WIDE)[0]
            names = store._calls.run("in a test", lambda c: list(c.scan_iter(match=f"*{key.digest}*")), Deadline(10))
            slots = {store._calls.run("in a test", lambda c, n=name: c.keyslot(n), Deadline(10)) for name in names}
            assert (len(slots) > 1) == spread
            store.blobs.write((ONE, WIDE), "offsets", b"x" * 1000)
            assert store.blobs.read((ONE, WIDE), "offsets") == b"x" * 1000
            assert store.delete(key)
            assert store.delete_namespace(ONE) == 5
            assert store._calls.run("in a test", lambda c: list(c.scan_iter()), Deadline(10)) == []


@contextmanager
def cluster(folder: Path) -> Iterator[list[RedisServer]]:
    """Three masters that share the slots."""
    import redis

    servers = [
        RedisServer(folder / str(n), ["--cluster-enabled", "yes", "--cluster-port", str(free_port())], port=free_port())
        for n in range(3)
    ]
    try:
        clients = [redis.Redis(port=server.port) for server in servers]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            low, high = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
            bus = int(servers[0].option("--cluster-port"))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port, bus)
        end = time.monotonic() + 30
        while any(b"cluster_state:ok" not in c.execute_command("CLUSTER", "INFO") for c in clients):
            if time.monotonic() > end:
                raise RuntimeError("the cluster did not form")
            time.sleep(0.05)
        for client in clients:
            client.close()
        yield servers
    finally:
        for server in servers:
            server.stop()
