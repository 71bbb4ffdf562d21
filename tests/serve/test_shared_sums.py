"""A node's side of the shared sums: nothing counts twice, whatever is lost on the way; all that arrived is kept."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.saved import Learned
from kvcomm.anchors.shared_sums import SharedSums
from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.serve.learned import LearnedSums, Subject
from kvcomm.store.sums import Opened, Others
from kvcomm.types import Namespace
from tests.serve.sums import MODEL, observation, pair

SUBJECT = Subject(Namespace("one"), MODEL)


class Wire:
    """A service whose next request, or next answer, can be lost."""

    def __init__(self, sums: LearnedSums) -> None:
        self.sums, self.lost = sums, ""
        self.sent: list[bytes] = []

    def open(self, node: str) -> Opened:
        return self.sums.open(SUBJECT, node)

    def put(self, node: str, epoch: int, sequence: int, data: bytes) -> bool:
        if self.lost == "request":
            raise StoreUnavailable("lost on the way")
        kept = self.sums.put(SUBJECT, node, epoch, sequence, data)
        self.sent.append(data)
        if self.lost == "answer":
            raise StoreUnavailable("lost on the way back")
        return kept

    def others(self, node: str, epoch: int, known: str) -> Others:
        return self.sums.others(SUBJECT, node, epoch, known)


class Node:
    def __init__(self, wire: Wire, name: str) -> None:
        self.wire, self.book = wire, OffsetBook(MODEL, learned=Learned.empty(MODEL))
        self.shared = SharedSums(self.book, wire, name)
        self.unanswered: set[int] = set()

    def learn(self, number: int) -> None:
        self.book.learn([observation(number)])
        self.unanswered.add(number)

    def sync(self, lost: str = "") -> set[int]:
        """The calls whose arrival was acknowledged by this."""
        self.wire.lost = lost
        try:
            self.shared.sync()
        except StoreUnavailable:
            return set()
        finally:
            self.wire.lost = ""
        done, self.unanswered = self.unanswered, set()
        return done

    def counts(self) -> dict[str, float]:
        return {str(p): float(sums.calls.max()) for p, sums in self.book.statistics.pairs.items()}


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    sums = LearnedSums(tmp_path / "learned")
    yield Wire(sums)
    sums.close()


def test_two_nodes_end_with_the_same_sums_as_one_that_saw_all(wire: Wire) -> None:
    a, b, one = Node(wire, "a"), Node(wire, "b"), OffsetBook(MODEL, learned=Learned.empty(MODEL))
    for number in range(6):
        one.learn([observation(number)])
        (a, b)[number % 2].learn(number)
        (a, b)[number % 2].sync()
    a.sync(), b.sync()
    assert a.book.statistics.digest() == b.book.statistics.digest() == one.statistics.digest()
    assert not a.shared.sync() and not b.shared.sync()  # nothing new


def test_what_was_fetched_is_never_sent(wire: Wire) -> None:
    a, b = Node(wire, "a"), Node(wire, "b")
    a.learn(0)
    a.sync()
    b.sync()
    assert pair(0) in b.book.statistics.pairs
    sent = len(wire.sent)
    b.sync()
    assert len(wire.sent) == sent  # b learned nothing itself
    b.learn(1)
    b.sync()
    assert b"b1/y" in _names(wire.sent[-1]) and b"b0/y" not in _names(wire.sent[-1])


def _names(data: bytes) -> bytes:
    from safetensors.torch import load

    return bytes(load(data)["pairs"].tolist())


def test_what_is_learned_during_a_sync_is_kept(wire: Wire) -> None:
    a, b = Node(wire, "a"), Node(wire, "b")
    b.learn(5)
    b.sync()
    a.learn(0)
    fetch = wire.others

    def late(node: str, epoch: int, known: str) -> Others:
        a.book.learn([observation(1)])
        return fetch(node, epoch, known)

    wire.others = late  # type: ignore[method-assign]
    a.sync()
    wire.others = fetch  # type: ignore[method-assign]
    assert set(a.book.statistics.pairs) == {pair(0), pair(1), pair(5)}
    a.sync(), b.sync()
    assert b.counts() == a.counts() == {str(pair(n)): 1.0 for n in (0, 1, 5)}


def test_a_restarted_node_has_what_it_sent(wire: Wire) -> None:
    a = Node(wire, "a")
    a.learn(0)
    a.sync()
    again = Node(wire, "a")
    again.sync()
    assert again.counts() == {str(pair(0)): 1.0}
    again.learn(1)
    again.sync()
    b = Node(wire, "b")
    b.sync()
    assert b.counts() == {str(pair(0)): 1.0, str(pair(1)): 1.0}
    a.sync()  # the old process finds out that it was replaced, and begins again from what is kept
    assert a.counts() == b.counts()


def test_forgotten_by_one_is_forgotten_by_all(wire: Wire) -> None:
    a, b = Node(wire, "a"), Node(wire, "b")
    a.learn(0), b.learn(1)
    a.sync(), b.sync(), a.sync()
    wire.sums.forget(SUBJECT, lambda label: label == pair(0).used)
    a.learn(2)
    a.sync(), b.sync(), a.sync()
    assert set(a.counts()) == set(b.counts()) == {str(pair(1)), str(pair(2))}


def test_a_book_that_holds_nothing_apart_is_refused(wire: Wire) -> None:
    with pytest.raises(InvalidInput, match="learned="):
        SharedSums(OffsetBook(MODEL), wire, "a").sync()


step = st.tuples(
    st.sampled_from(["learn", "sync", "request", "answer", "restart", "twin", "service"]), st.sampled_from("ab")
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, max_size=14))
def test_each_call_counts_once_whatever_is_lost(steps: list[tuple[str, str]]) -> None:
    """Calls have a pair each, so a call that counted twice shows as 2; acknowledged ones must all be there."""
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(LearnedSums(Path(folder) / "x"))
        nodes = {name: Node(wire, name) for name in "ab"}
        twins = [*nodes.values()]
        kept: set[int] = set()
        number = 0
        for what, name in steps:
            if what == "learn":
                number += 1
                nodes[name].learn(number)
            elif what == "restart":  # the process died: what was not answered may be gone
                nodes[name] = Node(wire, name)
            elif what == "twin":  # a second process of the same name, while the first lives on
                twins.append(nodes[name])
                nodes[name] = Node(wire, name)
            elif what == "service":
                wire.sums.close()
                wire.sums = LearnedSums(Path(folder) / "x")
            else:
                kept |= nodes[name].sync("" if what == "sync" else what)
        for node in (*twins, *nodes.values(), *nodes.values()):
            node.sync()
        onlooker = Node(wire, "onlooker")
        onlooker.sync()
        counts = onlooker.counts()
        assert set(counts.values()) <= {1.0}
        assert {str(pair(n)) for n in kept} <= set(counts)
        for node in nodes.values():
            assert node.counts() == counts
        wire.sums.close()
