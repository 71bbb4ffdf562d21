"""What a bad network may do: cut at every byte, silence, one byte at a time, resets, damage. Typed errors, in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm.errors import DeadlineExceeded, StoreError, StoreUnavailable
from kvcomm.store import MemoryStore, TieredStore, empty_kv
from kvcomm.store.testing import holds, same, sample
from kvcomm.transfer import client
from kvcomm.transfer.address import Address
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.remote import RemoteStore
from tests.serve.here import Proxy, cut_at, proxied

DEADLINE_S = 0.4
SLACK_S = 0.1


def timed(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        call()
    return time.monotonic() - started


@pytest.fixture(autouse=True)
def no_second_try(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cut" in request.node.name:
        monkeypatch.setattr(client, "TRIES", 1)


def once(address: str) -> RemoteStore:
    """A store that has not met the service yet."""
    store = RemoteStore(f"{address}.none", breaker=Breaker(limit=10**6))
    store._address = Address.parse(address)
    return store


def calls(store: RemoteStore, number: int) -> list[Callable[[], object]]:
    key, entry = sample(number)
    return [
        lambda: store.get(key, deadline_s=DEADLINE_S),
        lambda: store.put(key, entry, deadline_s=DEADLINE_S),
        lambda: store.contains(key, deadline_s=DEADLINE_S),
        lambda: store.get_into(key, empty_kv(key.fingerprint, 3), deadline_s=DEADLINE_S),
    ]


def test_answer_cut_at_every_byte_is_an_error_or_the_answer(tmp_path: Path) -> None:
    key, entry = sample(1)
    with proxied(tmp_path) as (_, proxy):
        with RemoteStore(proxy.address) as store:
            store.put(key, entry)
        seen: list[int] = []

        def watch(data: bytes, at: int) -> bytes:
            seen.append(at + len(data))
            return data

        proxy.answers = watch
        with once(proxy.address) as store:
            assert store.get_into(key, empty_kv(key.fingerprint, 3)) is not None
        whole = max(seen)
        assert whole > 500
        hits = 0
        for cut in range(whole + 1):
            proxy.answers = cut_at(cut)
            with once(proxy.address) as store:
                out = empty_kv(key.fingerprint, 3)
                try:
                    found = store.get_into(key, out, deadline_s=1.0)
                except StoreError:
                    continue
                assert found == entry.segment
                assert same(out, entry.kv)
                hits += 1
        assert hits >= 1  # cut only behind the whole answer
        assert proxy.connections > whole


def test_request_cut_at_every_byte_stores_all_or_nothing(tmp_path: Path) -> None:
    with proxied(tmp_path) as (service, proxy):
        for number, cut in enumerate(range(0, 3000, 11)):
            proxy.requests = cut_at(cut)
            with once(proxy.address) as store:
                try:
                    store.put(*sample(number), deadline_s=1.0)
                except StoreError:
                    assert not holds(service.store, number)
                else:
                    assert holds(service.store, number)
        assert service.core.uploads.reserved() == (0, 0)


@pytest.mark.parametrize("kind", ["black hole", "one byte a second", "garbage", "reset"])
def test_errors_come_in_time(tmp_path: Path, kind: str) -> None:
    with proxied(tmp_path) as (_, proxy):
        store = RemoteStore(proxy.address, breaker=Breaker(limit=10**6))
        store.put(*sample(0))
        spoil(proxy, kind)
        for number in (0, 1):
            for call in calls(store, number):
                assert timed(call) <= DEADLINE_S + SLACK_S
        store.close()


def spoil(proxy: Proxy, kind: str) -> None:
    if kind == "black hole":
        proxy.black_hole = True
    elif kind == "one byte a second":
        proxy.drip = True
    elif kind == "garbage":
        proxy.answers = lambda data, at: bytes(b ^ 0x5A for b in data)
    else:
        proxy.answers = cut_at(0)


def test_damaged_bytes_never_come_back(tmp_path: Path) -> None:
    key, entry = sample(3, tokens=600)
    with proxied(tmp_path) as (_, proxy):
        with RemoteStore(proxy.address) as store:
            store.put(key, entry)
        for at_byte in range(150, 9000, 450):

            def damage(data: bytes, at: int, at_byte: int = at_byte) -> bytes:
                if at <= at_byte < at + len(data):
                    changed = bytearray(data)
                    changed[at_byte - at] ^= 1
                    return bytes(changed)
                return data

            proxy.answers = damage
            with once(proxy.address) as store:
                out = empty_kv(key.fingerprint, 600)
                with pytest.raises(StoreError):
                    store.get_into(key, out, deadline_s=2.0)
        proxy.answers = lambda data, at: data
        with RemoteStore(proxy.address) as store:
            assert holds(store, 3, tokens=600)  # the service's own bytes are good, and stayed


def test_breaker_opens_and_closes(tmp_path: Path) -> None:
    with proxied(tmp_path) as (_, proxy):
        store = RemoteStore(proxy.address, breaker=Breaker(limit=2, pause_s=0.3))
        store.put(*sample(0))
        proxy.black_hole = True
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                store.contains(sample(0)[0], deadline_s=0.1)
        connections = proxy.connections
        assert timed(lambda: store.contains(sample(0)[0])) < 0.05
        assert proxy.connections == connections
        proxy.black_hole = False
        time.sleep(0.35)
        assert store.contains(sample(0)[0])
        store.close()


def test_tiers_go_on_without_the_service(tmp_path: Path) -> None:
    with proxied(tmp_path) as (_, proxy):
        remote = RemoteStore(proxy.address)
        store = TieredStore([MemoryStore(1 << 20), remote])
        store.put(*sample(0))
        proxy.close()
        assert holds(store, 0)
        store.put(*sample(1))
        assert holds(store, 1)
        store.close()


def test_no_service_at_all(tmp_path: Path) -> None:
    store = RemoteStore(f"unix:{tmp_path}/nobody.sock")
    assert not store.durable
    for call in calls(store, 0):
        assert timed(call) <= DEADLINE_S + SLACK_S
