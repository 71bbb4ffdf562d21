"""Learned sums, neighbours and news over a connection: rights, limits, refusals, and what a restart keeps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.saved import Learned, dump
from kvcomm.anchors.shared_sums import SharedSums
from kvcomm.errors import AccessDenied, CorruptEntry, InvalidInput, Superseded
from kvcomm.keys import CacheKey
from kvcomm.serve import changes
from kvcomm.serve.audit import AuditLog, Denials
from kvcomm.serve.changes import Changes
from kvcomm.serve.learned import Limits
from kvcomm.store import Attributes
from kvcomm.store.base import Deadline, Listing
from kvcomm.store.testing import ONE, TWO, sample
from kvcomm.transfer.news import News
from kvcomm.transfer.remote import RemoteStore
from tests.serve.here import service_here
from tests.serve.process import ServiceProcess
from tests.serve.sums import MODEL, learned, observation
from tests.serve.test_service import token


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def test_snapshots_larger_than_a_part_go_through_and_survive_a_restart(tmp_path: Path) -> None:
    big = Learned.empty(MODEL)
    for number in range(900):
        big.merge(learned(number))
    data = dump(big)
    assert len(data) > 1 << 20
    with ServiceProcess(tmp_path / "kept") as service:
        with RemoteStore(service.address) as store:
            sums = store.coordinator.sums(ONE, MODEL)
            opened = sums.open("a")
            assert sums.put("a", opened.epoch, 1, data)
            assert not sums.put("a", opened.epoch, 1, data)
        service.kill()
        service.start()
        with RemoteStore(service.address) as store:
            sums = store.coordinator.sums(ONE, MODEL)
            assert sums.open("a").kept == (opened.epoch, 1)
            found = sums.others("", 0, "")
            assert found.data is not None
            assert sums.others("", 0, found.version).data is None
            assert store.coordinator.sums(TWO, MODEL).others("", 0, "").data != found.data


def test_refusals_cross_the_wire_and_leave_nothing_reserved(tmp_path: Path) -> None:
    with service_here(tmp_path) as (service, address), RemoteStore(address) as store:
        sums = store.coordinator.sums(ONE, MODEL)
        old = sums.open("a")
        sums.open("a")
        with pytest.raises(Superseded, match="open it again"):
            sums.put("a", old.epoch, 1, dump(learned(1)))
        with pytest.raises(Superseded):
            sums.others("a", old.epoch, "")
        epoch = sums.open("a").epoch
        wrong = learned(1)
        wrong.statistics.yy -= 5.0
        with pytest.raises(CorruptEntry, match="its squares"):
            sums.put("a", epoch, 1, dump(wrong))
        with pytest.raises(InvalidInput, match="bytes"):
            sums.put("a", epoch, 1, b"x")
        service.core.learned.limits = Limits(snapshot_bytes=100)
        with pytest.raises(InvalidInput, match="100"):
            sums.put("a", epoch, 1, dump(learned(1)))
        service.core.learned.limits = Limits(nodes=1)
        with pytest.raises(InvalidInput, match="retire"):
            sums.open("b")
        assert service.core.uploads.reserved() == (0, 0)


def test_two_nodes_over_the_wire_and_a_label_that_is_forgotten(tmp_path: Path) -> None:
    with service_here(tmp_path) as (_, address), RemoteStore(address) as one, RemoteStore(address) as two:
        books = [OffsetBook(MODEL, learned=Learned.empty(MODEL)) for _ in range(2)]
        nodes = [
            SharedSums(book, store.coordinator.sums(ONE, MODEL), name)
            for book, store, name in zip(books, (one, two), "ab", strict=True)
        ]
        for n, book in enumerate(books):
            book.learn([observation(n)])
            nodes[n].sync()
        nodes[0].sync()
        assert books[0].statistics.digest() == books[1].statistics.digest()
        one.coordinator.forget_sums(ONE, MODEL, "b1")
        for node in (*nodes, *nodes):
            node.sync()
        assert {pair.used for book in books for pair in book.statistics.pairs} == {"b0/y"}
        assert one.coordinator.retire(ONE, MODEL, "b")
        assert not one.coordinator.retire(ONE, MODEL, "b")


def test_rights(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    reads, writes = token(kept, "one", "read"), token(kept, "one", "read", "write")
    with ServiceProcess(kept) as service:
        with RemoteStore(service.address, tokens={"one": writes}) as store:
            sums = store.coordinator.sums(ONE, MODEL)
            sums.put("a", sums.open("a").epoch, 1, dump(learned(1)))
            for call in (
                lambda: store.coordinator.forget_sums(ONE, MODEL, "a"),
                lambda: store.coordinator.retire(ONE, MODEL, "a"),
            ):
                with pytest.raises(AccessDenied, match="admin"):
                    call()
        with RemoteStore(service.address, tokens={"one": reads}) as store:
            sums = store.coordinator.sums(ONE, MODEL)
            assert sums.others("", 0, "").data is not None
            assert store.coordinator.nearest(ONE, MODEL, sample(1, tokens=20)[1].segment, 1, 0.5) == []
            for call in (lambda: sums.open("b"), lambda: sums.put("a", 1, 2, dump(learned(1)))):
                with pytest.raises(AccessDenied, match="write"):
                    call()
        assert service.stop() == 0
    lines = [json.loads(line) for line in (kept / "audit.jsonl").read_text().splitlines()]
    acts = [line["act"] for line in lines]
    assert acts[0] == "service_start"
    assert acts[-1] == "service_stop"
    assert lines[-1]["signal"] == "SIGTERM"
    denied = next(line for line in lines if line["act"] == "access_denied")
    assert denied["reason"] == "sums_forget"
    assert denied["namespace"] == "one"


def test_every_act_of_a_connection_is_written_down(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, str | int]]] = []
    with service_here(tmp_path) as (service, address), RemoteStore(address) as store:
        service.core.on_admin = lambda act, grant, facts: seen.append((act, facts))
        key, entry = sample(1)
        store.put(key, entry)
        store.delete(key)
        store.delete(key)
        store.put(*sample(2, attributes=Attributes(group="g")))
        store.delete_group(ONE, "g")
        store.coordinator.sums(ONE, MODEL).open("a")
        store.coordinator.forget_sums(ONE, MODEL, "agent")
        store.coordinator.retire(ONE, MODEL, "a")
        store.delete_namespace(ONE)
    assert [act for act, _ in seen] == ["delete", "delete_group", "forget", "retire_node", "delete_namespace"]
    assert seen[0][1] == {"key": key.digest}
    audit = AuditLog(tmp_path / "audit.jsonl")
    for act, facts in seen:  # all of it is on the log's closed lists
        audit.write(act, "local", "one", **facts)


def test_a_flood_of_refusals_is_one_line_a_second(tmp_path: Path) -> None:
    at = [0.0]
    denials = Denials(AuditLog(tmp_path / "audit.jsonl"), lambda: at[0])
    for n in range(1000):
        at[0] = n / 400
        denials("unknown", "", "hello")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["count"] for line in lines] == [1, 400, 400]


def test_nearest_tells_of_what_is_held_now_in_one_namespace(tmp_path: Path) -> None:
    with service_here(tmp_path) as (service, address), RemoteStore(address) as store:
        key, entry = sample(1, tokens=64)
        fingerprint = key.fingerprint
        store.put(key, entry)
        near = store.coordinator.nearest(ONE, fingerprint, entry.segment, 4, 0.5)
        assert [(n.segment, n.keys) for n in near] == [(entry.segment, (key,))]
        assert store.coordinator.nearest(ONE, fingerprint, entry.segment, 4, 0.5, context="nowhere") == []
        assert store.coordinator.nearest(TWO, fingerprint, entry.segment, 4, 0.5) == []
        service.core.neighbours.delete_namespace(ONE)  # as after a restart
        service.core.neighbours._built.clear()
        assert [n.keys for n in store.coordinator.nearest(ONE, fingerprint, entry.segment, 4, 0.5)] == [(key,)]
        service.store.delete(key)  # as an eviction: the index is not told
        assert store.coordinator.nearest(ONE, fingerprint, entry.segment, 4, 0.5) == []


class Follower:
    """What it was told, in order."""

    def __init__(self) -> None:
        self.held: dict[CacheKey, str] = {}
        self.listings = self.beats = 0

    def listed(self, listings: list[Listing]) -> None:
        self.held = {entry.key: entry.attributes.group for entry in listings}
        self.listings += 1

    def added(self, key: CacheKey, group: str) -> None:
        self.held[key] = group

    def removed(self, key: CacheKey) -> None:
        self.held.pop(key, None)

    def dropped(self, group: str) -> None:
        self.held = {key: of for key, of in self.held.items() if group and of != group}

    def alive(self) -> None:
        self.beats += 1


def test_a_follower_knows_what_is_held_also_after_a_kill(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "kept") as service, RemoteStore(service.address) as store:
        follower = Follower()
        store.put(*sample(0))
        stop = store.coordinator.follow(ONE, sample(0)[0].fingerprint, follower)
        until(lambda: len(follower.held) == 1)
        for n in range(1, 5):
            store.put(*sample(n, attributes=Attributes(group="g" if n > 2 else "")))
        store.put(*sample(9, namespace=TWO))
        store.delete(sample(1)[0])
        until(lambda: set(follower.held) == {sample(n)[0] for n in (0, 2, 3, 4)})
        store.delete_group(ONE, "g")
        until(lambda: set(follower.held) == {sample(n)[0] for n in (0, 2)})
        assert follower.listings == 1
        service.kill()
        service.start()
        until(lambda: follower.listings == 2)
        store.put(*sample(7))
        until(lambda: set(follower.held) == {sample(n)[0] for n in (0, 2, 7)})
        stop()
        beats = follower.beats
        time.sleep(0.2)
        assert follower.beats <= beats + 1


def test_changes_are_bounded_and_tell_who_missed_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "KEPT", 8)
    monkeypatch.setattr(changes, "MAX_NAMESPACES", 2)
    news = Changes()
    drop = News("dropped", None, "g")
    for _ in range(20):
        news.add("one", drop)
    assert news.since("one", 20) == (20, [])
    assert news.since("one", 12) == (20, [drop] * 8)
    assert news.since("one", 11) is None
    assert news.since("one", 21) is None
    news.add("two", drop), news.add("three", drop)  # one is forgotten, the quiet one
    assert news.since("one", 20) is None
    news.add("one", drop)
    assert news.since("one", 20) is None
    waiting = threading.Thread(target=news.wait, args=("one", news.last("one"), Deadline(30.0)))
    waiting.start()
    news.close()
    waiting.join(5.0)
    assert not waiting.is_alive()
