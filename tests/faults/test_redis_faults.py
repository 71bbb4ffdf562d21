"""Redis killed under traffic, silent, full, evicting, with parts missing or changed: whole, or a miss, or an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm.errors import CorruptEntry, DeadlineExceeded, StoreFull, StoreUnavailable
from kvcomm.store import Store, empty_kv
from kvcomm.store.base import Deadline
from kvcomm.store.testing import fingerprint, same, sample
from kvcomm.transfer.redis import RedisStore
from tests.redis_server import RedisServer, needs_redis

WIDE = fingerprint(8, 4, 64)  # 16 KiB a token in float32
TOKENS = 20  # 320 KiB, in parts of 64 KiB
PART = 64 << 10
SLACK_S = 3.0  # a loaded machine's own delay, beside the deadline


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[RedisServer, RedisStore]]]:
    needs_redis()
    running: list[tuple[RedisServer, RedisStore]] = []

    def start(*options: str) -> tuple[RedisServer, RedisStore]:
        server = RedisServer(tmp_path / f"redis{len(running)}", options)
        running.append((server, RedisStore(server.address, part_bytes=PART)))
        return running[-1]

    yield start
    for server, store in running:
        store.close()
        server.stop()


def whole(store: Store, number: int, deadline_s: float = 10.0) -> bool:
    """Whether ``number`` is held; an AssertionError if other bytes are."""
    key, entry = sample(number, tokens=TOKENS, model=WIDE)
    out = empty_kv(WIDE, TOKENS)
    if store.get_into(key, out, deadline_s=deadline_s) is None:
        return False
    assert same(out, entry.kv), f"other bytes for {number}"
    return True


def put(store: Store, number: int, deadline_s: float = 10.0) -> bool:
    return store.put(*sample(number, tokens=TOKENS, model=WIDE), deadline_s=deadline_s).stored


def raw(store: RedisStore, call: Callable[[Any], Any]) -> Any:
    return store._calls.run("in a test", call, Deadline(10))


def parts(store: RedisStore) -> list[bytes]:
    return sorted(raw(store, lambda client: list(client.scan_iter(match="*:p:*"))))


def test_each_part_missing_is_a_miss_and_can_be_put_again(serve: Callable[..., Any]) -> None:
    _, store = serve()
    put(store, 1)
    count = len(parts(store))
    assert count == 5
    for which in range(count):
        raw(store, lambda client, w=which: client.delete(parts(store)[w]))
        assert not store.contains(sample(1, tokens=TOKENS, model=WIDE)[0])
        assert not whole(store, 1)
        assert parts(store) == []  # the others went with it
        assert put(store, 1)
        assert whole(store, 1)
    raw(store, lambda client: client.delete(parts(store)[0]))
    assert store.get(sample(1, tokens=TOKENS, model=WIDE)[0]) is None
    assert put(store, 1)
    raw(store, lambda client: client.delete(parts(store)[0]))
    assert put(store, 1)  # a put finds the gap by itself


def test_part_gone_under_a_handle_is_said(serve: Callable[..., Any]) -> None:
    _, store = serve()
    put(store, 1)
    handle = store.get(sample(1, tokens=TOKENS, model=WIDE)[0])
    assert handle is not None
    raw(store, lambda client: client.delete(*parts(store)))
    out = empty_kv(WIDE, TOKENS)
    out.keys.fill_(7)
    with handle, pytest.raises(StoreUnavailable):
        handle.read_into(out)
    assert not out.keys.any()


def test_every_changed_place_is_corrupt_once_and_then_a_miss(serve: Callable[..., Any]) -> None:
    _, store = serve()
    put(store, 1)
    places = [(name, at) for name in parts(store) for at in (0, 30000)]
    manifest = raw(store, lambda client: next(iter(client.scan_iter(match="*:e:*"))))
    places += [(manifest, at) for at in (0, 41, 60, 200, 1200)]
    for name, at in places:
        put(store, 1)
        now = [name]
        if b":p:" in name:  # a new generation has new names, and parts of the last one may not be gone yet
            now = [part for part in parts(store) if part.rsplit(b":", 1)[1] == name.rsplit(b":", 1)[1]]
        for place in now:
            byte = raw(store, lambda client, n=place, a=at: client.getrange(n, a, a))
            raw(store, lambda client, n=place, a=at, b=byte: client.setrange(n, a, bytes([b[0] ^ 1])))
        with pytest.raises(CorruptEntry):
            whole(store, 1)
        assert not whole(store, 1), (name, at)
    put(store, 1)
    for place in parts(store):
        raw(store, lambda client, n=place: client.set(n, b"short"))
    with pytest.raises(CorruptEntry):
        whole(store, 1)


def test_full_without_eviction_is_refused_and_leaves_nothing(serve: Callable[..., Any]) -> None:
    _, store = serve("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    stored = 0
    with pytest.raises(StoreFull):
        for number in range(40):
            put(store, number)
            stored += 1
    assert stored >= 3
    assert all(whole(store, number) for number in range(stored))
    assert len(parts(store)) == 5 * stored
    assert store.stats().counters["failed"] == 1


def test_half_the_working_set_fits(serve: Callable[..., Any]) -> None:
    """20 entries of 320 KiB, room for about half: acknowledged or refused, whole or a miss, within the deadline."""
    _, store = serve("--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru")
    hits = refused = 0
    for turn in range(60):
        number = (turn * 7) % 20
        start = time.monotonic()
        if whole(store, number, 5.0):
            hits += 1
        else:
            try:
                put(store, number, 5.0)
            except StoreUnavailable:
                refused += 1
        assert time.monotonic() - start < 10.0 + SLACK_S
    assert store.stats().counters.get("corrupt", 0) == 0
    assert refused < 30
    near = sum(whole(store, 3) or put(store, 3) and whole(store, 3) for _ in range(5))
    assert near  # what is used right after its put is there


def test_more_than_fits_is_refused(serve: Callable[..., Any]) -> None:
    _, store = serve("--maxmemory", "1500kb", "--maxmemory-policy", "allkeys-lru")
    key, entry = sample(1, tokens=200, model=WIDE)
    with pytest.raises(StoreUnavailable):
        store.put(key, entry)
    assert not store.contains(key)


def test_silent_server_ends_at_the_deadline(serve: Callable[..., Any]) -> None:
    server, store = serve()
    put(store, 1)
    server.pause()
    calls: list[Callable[[], object]] = [
        lambda: whole(store, 1, 0.3), lambda: put(store, 2, 0.3),
        lambda: store.contains(sample(1)[0], deadline_s=0.3), lambda: store.flush(deadline_s=0.3),
    ]  # fmt: skip
    for call in calls:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            call()
        # taking a failed put back may take its own second more
        assert time.monotonic() - start < 0.3 + 1.0 + SLACK_S
    server.resume()
    assert whole(store, 1)
    assert put(store, 2)


def test_dead_server_is_said_at_once_and_forgotten_when_it_is_back(serve: Callable[..., Any]) -> None:
    server, store = serve()
    put(store, 1)
    server.kill()
    for call in (lambda: whole(store, 1), lambda: put(store, 2), lambda: list(store.entries())):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call()
        assert time.monotonic() - start < 1.0 + SLACK_S
    server.start()
    assert not whole(store, 1)  # it kept nothing on disk
    assert put(store, 1)
    assert whole(store, 1)


def test_killed_and_restarted_under_traffic(serve: Callable[..., Any]) -> None:
    """Three kills; a server that writes to disk, so that what it kept comes back, in whatever state it is in."""
    server, store = serve("--appendonly", "yes", "--appendfsync", "everysec")
    stop = threading.Event()
    wrong: list[BaseException] = []
    counts = {"put": 0, "read": 0, "refused": 0}

    def work(seed: int) -> None:
        number = seed
        while not stop.is_set():
            number = (number * 5 + 3) % 12
            start = time.monotonic()
            try:
                if whole(store, number, 2.0):
                    counts["read"] += 1
                elif put(store, number, 2.0):
                    counts["put"] += 1
            except StoreUnavailable:
                counts["refused"] += 1
                time.sleep(0.01)
            except BaseException as error:
                wrong.append(error)
                return
            if time.monotonic() - start > 5.0 + SLACK_S:
                wrong.append(AssertionError("a call stalled beyond its deadline"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(1.0)
        server.kill()
        time.sleep(0.1)
        server.start()
    time.sleep(1.0)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert counts["put"]
    for number in range(12):
        whole(store, number) or put(store, number)
        assert whole(store, number)


def test_writer_that_died_leaves_what_goes_by_itself(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcomm.transfer.redis_upload import Upload

    _, store = serve()

    class Died(BaseException):
        pass

    def die(self: Upload, deadline: Deadline) -> bool:
        raise Died

    monkeypatch.setattr(Upload, "_commit", die)
    monkeypatch.setattr(Upload, "_abandon", lambda self: None)
    with pytest.raises(Died):
        put(store, 1)
    monkeypatch.undo()
    assert not whole(store, 1)
    left = [raw(store, lambda client, n=name: client.pttl(n)) for name in parts(store)]
    assert len(left) == 5
    assert all(0 < each <= 71_000 for each in left)
    assert put(store, 1)
    assert whole(store, 1)


def test_a_lease_does_not_hold_against_eviction_and_never_gives_other_bytes(serve: Callable[..., Any]) -> None:
    """Redis evicts under ten leased handles; each then reads its own bytes, or says that they are gone, and zeros."""
    _, store = serve("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    handles = []
    for number in range(10):
        assert put(store, number)
        handle = store.get(sample(number, tokens=TOKENS, model=WIDE)[0], lease_s=60.0)
        if handle is not None:
            handles.append((number, handle))
    for number in range(100, 120):  # more than fits: what was used longest ago goes, by part
        put(store, number)
    wholes = gone = 0
    for number, handle in handles:
        out = empty_kv(WIDE, TOKENS)
        out.keys.fill_(7)
        with handle:
            try:
                handle.read_into(out)
            except StoreUnavailable:
                assert not out.keys.any()
                gone += 1
            else:
                assert same(out, sample(number, tokens=TOKENS, model=WIDE)[1].kv)
                wholes += 1
        whole(store, number)  # afterwards: whole or a miss, no error
    assert gone, "nothing was evicted: the test shows nothing"
    assert wholes + gone == len(handles) >= 5
    assert store.stats().counters.get("corrupt", 0) == 0
