"""Clients that vanish, more than the service can do, restarts under traffic, and histories checked against a model."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm.errors import Overloaded, StoreError, StoreUnavailable
from kvcomm.serve.claims import Claims
from kvcomm.serve.uploads import PART_BYTES, Uploads
from kvcomm.store import Attributes, Entry, Priority
from kvcomm.store.base import Deadline
from kvcomm.store.testing import ONE, TWO, fingerprint, holds, same, sample
from kvcomm.transfer.address import Address
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.remote import RemoteStore
from kvcomm.types import SegmentKV
from tests.serve.here import service_here
from tests.serve.process import ServiceProcess

WIDE = fingerprint(16, 4, 64)


def patient(address: str) -> RemoteStore:
    return RemoteStore(address, breaker=Breaker(limit=10**6))


def test_reserved_bytes_of_vanished_clients_are_free_after_the_lease(tmp_path: Path) -> None:
    with service_here(tmp_path, upload_bytes=16 << 20) as (service, address):
        refused = 0
        for number in range(300):
            wire = Address.parse(address).connect(Deadline(5.0))
            wire.send(Kind.REQUEST, 1, {"call": "hello", "token": "one"}, Deadline(5.0))
            begin = {"call": "begin", "upload": f"{number:032x}", "nbytes": 1 << 17, "lease_ms": 700, "entry": False}
            wire.send(Kind.REQUEST, 2, begin, Deadline(5.0))
            wire.receive(Deadline(5.0))
            refused += wire.receive(Deadline(5.0))[0].kind is Kind.REFUSAL
            wire.close()
        assert service.core.uploads.reserved()[0] <= 8 << 20
        time.sleep(0.8)
        assert service.core.uploads.reserved() == (0, 0)
        with patient(address) as store:
            assert store.put(*sample(1, tokens=100, model=WIDE)).stored
        end = time.monotonic() + 5
        while service.server.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert service.server.connections == 0
        assert service.server.leases == 0


def test_uploads_are_bounded_and_resumed() -> None:
    now = [0.0]
    uploads = Uploads(64 << 20, 4, clock=lambda: now[0])
    one = uploads.begin("one", "a", 2 * PART_BYTES + 5, 10.0)
    with uploads.part(one, 0, PART_BYTES) as room:
        room[:3] = b"abc"
    with pytest.raises(RuntimeError), uploads.part(one, 2, 5):
        raise RuntimeError
    again = uploads.begin("one", "a", 2 * PART_BYTES + 5, 10.0)
    assert again is one
    assert (sorted(again.parts), again.whole) == ([0], False)
    uploads.begin("one", "b", 1, 10.0)
    with pytest.raises(Overloaded):
        uploads.begin("one", "c", 1, 10.0)  # half of the uploads, for one namespace
    uploads.begin("two", "c", 1, 10.0)
    now[0] = 10.0
    assert uploads.reserved() == (0, 0)
    with pytest.raises(StoreUnavailable):
        uploads.find("one", "a")


def test_large_values_in_parts_and_only_what_is_missing_is_sent_again(tmp_path: Path) -> None:
    key, entry = sample(2, tokens=700, model=WIDE)  # 22 MiB, three parts
    with service_here(tmp_path) as (service, address):
        from kvcomm.store.codec import EntryWriter
        from kvcomm.transfer.upload import send_parts

        store = patient(address)
        buffers = [b for part in EntryWriter(key, entry, "raw", 0.0, None) for b in part]
        client = store._client(ONE)
        upload = "ab" * 16
        first = client.take(Deadline(5.0))
        begin = {"call": "begin", "upload": upload, "nbytes": sum(map(len, buffers)), "lease_ms": 5000, "entry": False}
        first.ask(begin, Deadline(5.0))
        from kvcomm.transfer.wire import cut

        first.ask({"call": "part", "upload": upload, "part": 1}, Deadline(5.0), cut(buffers, PART_BYTES, PART_BYTES))
        first.wire.close()
        second = client.take(Deadline(5.0))
        commit = {"call": "commit", "upload": upload, "left_ms": None}
        send_parts(second, [buffers], sum(map(len, buffers)), upload, Deadline(5.0), commit, None)
        assert second.wire.sent < sum(map(len, buffers)) - PART_BYTES + 10000
        handle = store.get(key)
        assert handle is not None
        with handle:
            assert same(handle.read(), entry.kv)
            keys = torch.empty(4, 700, 64)
            for layer in (3, 4, 15, 0):
                handle.layer_into(layer, keys, keys.clone())
                assert torch.equal(keys, entry.kv.keys[layer])
        assert store.contains(key)  # the connection is usable after what was read in advance
        assert not store.put(key, entry).stored
        assert service.core.uploads.reserved() == (0, 0)
        store.close()


def test_overload_is_refused_soon_and_passes(tmp_path: Path) -> None:
    with service_here(tmp_path, max_connections=4) as (service, address):
        held = [patient(address) for _ in range(4)]
        for number, store in enumerate(held):
            store.put(*sample(number))
        started = time.monotonic()
        wire = Address.parse(address).connect(Deadline(1.0))
        preamble, header = wire.receive(Deadline(1.0))
        assert time.monotonic() - started < 0.5  # 50 ms on a quiet machine
        assert (preamble.kind, header["code"]) == (Kind.REFUSAL, "overloaded")
        late = patient(address)
        with pytest.raises(Overloaded):
            late.contains(sample(0)[0], deadline_s=0.5)
        for store in held:
            store.close()
        end = time.monotonic() + 5
        while service.server.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert late.contains(sample(0)[0])
        late.close()


def test_calls_beyond_the_slots_are_refused(tmp_path: Path) -> None:
    with service_here(tmp_path, slots=1) as (service, address), patient(address) as store:
        store.put(*sample(0))
        with service.core.admission.slot(), pytest.raises(Overloaded):
            store.contains(sample(0)[0], deadline_s=1.0)
        assert store.contains(sample(0)[0])


def test_one_computes_and_the_others_wait(tmp_path: Path) -> None:
    with service_here(tmp_path) as (_, address):
        stores = [patient(address) for _ in range(4)]
        key, entry = sample(0)
        computed = []

        def compute() -> Entry:
            computed.append(1)
            time.sleep(0.3)
            return entry

        def work(store: RemoteStore) -> None:
            with store.get_or_compute(key, compute) as handle:
                assert same(handle.read(), entry.kv)

        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(computed) == 1
        for store in stores:
            store.close()


def test_a_claim_ends_with_its_lease() -> None:
    claims = Claims()
    assert claims.take("k", 0.2) is not None
    assert claims.take("k", 0.2) is None
    assert not claims.wait("k", Deadline(0.05))
    assert claims.wait("k", Deadline(5.0))
    holder = claims.take("k", 5.0)
    assert not claims.give_back("k", "0" * 32)
    assert claims.give_back("k", holder)


def test_drops_are_pushed_and_remembered(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    with service_here(tmp_path) as (_, address):
        watching = RemoteStore(address, tokens={"one": "one"}, on_drop=[lambda n, g: told.append((n.name, g))])
        time.sleep(0.3)
        with patient(address) as other:
            other.put(*sample(0, attributes=Attributes(Priority.TOOL, "search@1")))
            assert other.delete_group(ONE, "search@1") == 1
            other.delete_group(TWO, "search@1")
            end = time.monotonic() + 5
            while not told and time.monotonic() < end:
                time.sleep(0.01)
        watching.close()
    assert told == [("one", "search@1")]


@dataclass
class Event:
    """One call of a history; ``value`` is which of two contents was put or seen, None for a miss."""

    key: int
    kind: str
    value: int | None
    began: float
    ended: float
    known: bool


def content(number: int, value: int) -> tuple[Any, Entry]:
    key, entry = sample(number)
    return key, Entry(entry.segment, SegmentKV(entry.kv.keys + value, entry.kv.values))


def accepted(events: list[Event]) -> bool:
    """Whether a write-once register explains what was seen of one key.

    Once a put is acknowledged, every get that begins later sees the value that won, unless it failed. The value that
    won is the same for all, was put by somebody before it was seen, and no put that began after it was seen wins.
    """
    seen = {e.value for e in events if e.kind == "get" and e.known and e.value is not None}
    won = {e.value for e in events if e.kind == "put" and e.known and e.value is not None and e.value >= 0}
    if len(seen | won) > 1:
        return False
    if not seen | won:
        return True
    (value,) = seen | won
    began = [e.began for e in events if e.kind == "put" and e.value in (value, -1 - value)]
    first_held = min([e.ended for e in events if e.known and e.value is not None], default=float("inf"))
    for e in events:
        if e.kind == "get" and e.known:
            if e.value is None and e.began > first_held:
                return False
            if e.value is not None and not any(b < e.ended for b in began):
                return False
    return True


def test_the_model_refuses_wrong_histories() -> None:
    put, other = Event(0, "put", 1, 0.0, 1.0, True), Event(0, "put", 2, 0.0, 1.0, True)
    assert accepted([put, Event(0, "get", 1, 2.0, 3.0, True)])
    assert not accepted([put, other])
    assert not accepted([put, Event(0, "get", None, 2.0, 3.0, True)])
    assert not accepted([put, Event(0, "get", 2, 2.0, 3.0, True)])
    assert not accepted([Event(0, "get", 1, 0.0, 0.5, True), Event(0, "put", 1, 0.6, 1.0, True)])


def test_histories_of_eight_clients_with_kills_are_a_register_s(tmp_path: Path) -> None:
    """Each life of the service ends while clients call, once so many calls of that life found or kept a value.

    By calls and not by the clock: how many a second there are, and how long a service takes to start, is the machine's.
    """
    keys, kills, each = 20, 3, 20
    events: list[Event] = []
    wrong: list[BaseException] = []
    stop = threading.Event()

    def values() -> int:
        return sum(event.known and event.value is not None for event in list(events))

    with ServiceProcess(tmp_path / "kept") as service:

        def client(seed: int) -> None:
            chance = random.Random(seed)
            store = patient(service.address)
            try:
                while not stop.is_set():
                    events.append(one_call(store, chance, keys, seed))
                    stop.wait(chance.random() * 0.1)
            except BaseException as error:
                wrong.append(error)
            finally:
                store.close()

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        try:
            for life in range(kills + 1):
                end, wanted = time.monotonic() + 60.0, values() + each
                while values() < wanted and not wrong:
                    assert time.monotonic() < end, f"life {life} of the service: {values()} of {wanted} in a minute"
                    time.sleep(0.01)
                if life < kills:
                    service.kill()
                    service.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
        assert not wrong
        with patient(service.address) as store:
            for number in range(keys):
                events.append(look(store, number))
    by_key = defaultdict(list)
    for event in events:
        by_key[event.key].append(event)
    assert values() >= (kills + 1) * each
    assert {event.kind for event in events if not event.known} == {"get", "put"}  # some were lost, as was intended
    assert all(accepted(found) for found in by_key.values())


def one_call(store: RemoteStore, chance: random.Random, keys: int, value: int) -> Event:
    number = chance.randrange(keys)
    if chance.random() < 0.5:
        return look(store, number)
    key, entry = content(number, value)
    began = time.monotonic()
    try:
        stored = store.put(key, entry, deadline_s=2.0).stored
    except StoreError:
        return Event(number, "put", -1 - value, began, time.monotonic(), False)
    # A put that was tried again after a lost answer finds its own value: then it is not known who won.
    return Event(number, "put", value if stored else -1 - value, began, time.monotonic(), stored)


def look(store: RemoteStore, number: int) -> Event:
    key, entry = content(number, 0)
    began = time.monotonic()
    try:
        handle = store.get(key, deadline_s=2.0)
        if handle is None:
            return Event(number, "get", None, began, time.monotonic(), True)
        with handle:
            found = handle.read()
    except StoreError:
        return Event(number, "get", None, began, time.monotonic(), False)
    value = round(float((found.keys - entry.kv.keys).mean()))
    assert same(found, content(number, value)[1].kv)
    return Event(number, "get", value, began, time.monotonic(), True)


def test_killed_and_started_again_under_traffic(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    with ServiceProcess(tmp_path / "kept", tcp=True) as service:
        store = patient(service.address)
        stop = threading.Event()

        def traffic() -> None:
            number = 0
            while not stop.is_set():
                try:
                    if store.put(*sample(number), deadline_s=1.0).durable:
                        acknowledged.append(number)
                except StoreUnavailable:
                    pass
                number += 1

        thread = threading.Thread(target=traffic)
        thread.start()
        for _ in range(3):
            time.sleep(0.7)
            service.kill()
            service.start()
        time.sleep(0.5)
        stop.set()
        thread.join(20)
        assert len(acknowledged) > 10
        assert all(holds(store, number) for number in acknowledged)
        assert service.stop() == 0
        store.close()
