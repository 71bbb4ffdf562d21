"""The service's neighbour index: near texts by context, limits, rebuilt from a store, apart by namespace."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvcomm.errors import InvalidInput
from kvcomm.keys import CacheKey, Recipe
from kvcomm.serve.neighbours import MAX_COUNT, Neighbours
from kvcomm.store import DiskStore, MemoryStore
from kvcomm.store.base import Entry, Store
from kvcomm.store.testing import ONE, TWO, fingerprint, sample
from kvcomm.types import Namespace, Segment

MODEL = fingerprint()


def text(seed: int, edits: int = 0, tokens: int = 60) -> Segment:
    """Text number ``seed``, its last ``edits`` tokens written anew."""
    ids = [(seed * 7919 + n * n * 31 + n) % 50_000 for n in range(tokens)]
    return Segment(tuple([*ids[: tokens - edits], *(60_000 + n for n in range(edits))]))


def key(segment: Segment, context: str = "a/x", space: Namespace = ONE) -> CacheKey:
    return CacheKey.of(space, MODEL, segment, Recipe("prompt", context, "p", False))


@pytest.fixture
def index() -> Neighbours:
    return Neighbours()


def test_near_texts_come_nearest_first_with_their_keys(index: Neighbours) -> None:
    for edits in (3, 10, 20):
        index.add(key(text(1, edits)), text(1, edits))
    for seed in range(2, 30):
        index.add(key(text(seed)), text(seed))
    index.add(key(text(1, 3), "b/y"), text(1, 3))
    found = index.nearest(ONE, MODEL, text(1))
    assert [n.segment for n in found] == [text(1, 3), text(1, 10), text(1, 20)]
    assert set(found[0].keys) == {key(text(1, 3)), key(text(1, 3), "b/y")}
    assert found[0].cosine > found[1].cosine > found[2].cosine >= 0.5
    assert len(index.nearest(ONE, MODEL, text(1), count=1)) == 1
    there = index.nearest(ONE, MODEL, text(1), context="b/y")
    assert [n.keys for n in there] == [(key(text(1, 3), "b/y"),)]
    assert index.nearest(ONE, MODEL, text(1), context="nowhere") == []


def test_removed_entries_are_not_found(index: Neighbours) -> None:
    here, there = key(text(1, 3)), key(text(1, 3), "b/y")
    for each in (here, there):
        index.add(each, text(1, 3))
    assert index.remove(here) and not index.remove(here)
    assert index.nearest(ONE, MODEL, text(1), context="a/x") == []
    assert index.nearest(ONE, MODEL, text(1))[0].keys == (there,)
    assert index.remove(there)
    assert index.nearest(ONE, MODEL, text(1)) == [] and index.texts(ONE, MODEL) == 0


def test_a_tenant_sees_what_it_would_see_alone(index: Neighbours) -> None:
    alone = Neighbours()
    for seed in range(20):
        for each in (index, alone):
            each.add(key(text(seed, 3)), text(seed, 3))
        for near in (text(seed), text(seed, 1)):
            index.add(key(near, space=TWO), near)
            index.nearest(TWO, MODEL, near)
    for seed in range(25):
        for context in (None, "a/x"):
            assert index.nearest(ONE, MODEL, text(seed), context=context) == alone.nearest(
                ONE, MODEL, text(seed), context=context
            )
    index.delete_namespace(TWO)
    assert index.nearest(TWO, MODEL, text(1)) == [] and index.texts(ONE, MODEL) == 20
    assert index.nearest(ONE, replace(MODEL, weights="v"), text(1)) == []


def test_limits_drop_a_namespaces_own_oldest_texts() -> None:
    index = Neighbours(max_texts=5, max_tokens=250)
    index.add(key(text(99), space=TWO), text(99))
    for seed in range(10):
        index.add(key(text(seed)), text(seed))
    assert index.texts(ONE, MODEL) == 4 and index.texts(TWO, MODEL) == 1
    assert [bool(index.nearest(ONE, MODEL, text(seed), least=0.99)) for seed in range(10)] == [False] * 6 + [True] * 4
    assert not index.add(key(text(1, tokens=300)), text(1, tokens=300))
    assert not index.add(key(text(1, tokens=15)), text(1, tokens=15))


def test_wrong_arguments(index: Neighbours) -> None:
    with pytest.raises(InvalidInput, match="key names"):
        index.add(key(text(1)), text(2))
    for count in (0, -1, MAX_COUNT + 1):
        with pytest.raises(InvalidInput, match="count"):
            index.nearest(ONE, MODEL, text(1), count=count)
    with pytest.raises(InvalidInput, match="at least 1"):
        Neighbours(max_texts=0)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_rebuilt_from_a_store(tmp_path: Path, kind: str) -> None:
    store: Store = MemoryStore(1 << 20) if kind == "memory" else DiskStore(tmp_path / "s", max_bytes=1 << 20)
    with store:
        for number in range(4):
            for space in (ONE, TWO):
                store.put(*sample(number, tokens=20, namespace=space))
        index, entry = Neighbours(), sample(2, tokens=20)[1]
        assert index.rebuild(store) == 8
        assert isinstance(entry, Entry)
        (found,) = index.nearest(ONE, MODEL, entry.segment, least=0.9)
        assert found.segment == entry.segment and found.keys == (sample(2, tokens=20)[0],)
        only = Neighbours()
        assert only.rebuild(store, [TWO]) == 4 and only.texts(ONE, MODEL) == 0
