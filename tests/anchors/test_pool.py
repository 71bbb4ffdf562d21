"""The pool: the first put wins, limits hold, the least recently used goes first, parents are read and never written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.anchors.pool import BasePool
from kvcomm.errors import InvalidInput
from kvcomm.keys import Recipe
from kvcomm.types import Namespace, Segment, SegmentKV
from tests.anchors.synthetic import FINGERPRINT, random_kv

HERE = Namespace("default")
RECIPE = Recipe("prompt", "coder/task", "p", True)
OTHER = replace(RECIPE, context="critic/task")
PER_TOKEN = FINGERPRINT.bytes_per_token


def pool(**options: Any) -> BasePool:
    return BasePool(HERE, FINGERPRINT, **options)


def text(n: int, tokens: int = 2) -> Segment:
    return Segment((n,) * tokens)


def test_the_first_put_wins() -> None:
    held, first, second = pool(), random_kv(2, 1), random_kv(2, 2)
    assert held.put(text(1), RECIPE, first)
    state = held.digest(), held.version, held.nbytes
    assert not held.put(text(1), RECIPE, second)
    base = held.get(text(1), RECIPE)
    assert base is not None and base.kv is first
    assert (held.digest(), held.version, held.nbytes) == state
    assert held.put(text(1), OTHER, second)
    assert [b.recipe for b in held.bases(text(1))] == [RECIPE, OTHER]
    assert held.get(text(2), RECIPE) is None and held.bases(text(2)) == []


def test_the_digest_is_free_of_order() -> None:
    one, other = pool(), pool()
    for n in (1, 2, 3):
        one.put(text(n), RECIPE, random_kv(2, n))
    for n in (3, 1, 2):
        other.put(text(n), RECIPE, random_kv(2, n))
    assert one.digest() == other.digest() != pool().digest()
    assert one.digest() != BasePool(Namespace("else"), FINGERPRINT).digest()


def test_count_limit_drops_the_least_recently_used() -> None:
    held = pool(max_entries=3)
    for n in (1, 2, 3):
        held.put(text(n), RECIPE, random_kv(2, n))
    held.get(text(1), RECIPE)
    held.bases(text(2))
    held.put(text(4), RECIPE, random_kv(2, 4))
    assert {base.segment for base in held} == {text(1), text(2), text(4)}
    assert (held.evicted, len(held)) == (1, 3)


def test_byte_limit_makes_as_much_room_as_needed() -> None:
    held = pool(max_bytes=6 * PER_TOKEN)
    for n in (1, 2, 3):
        held.put(text(n), RECIPE, random_kv(2, n))
    assert held.nbytes == 6 * PER_TOKEN
    assert held.put(text(4, tokens=3), RECIPE, random_kv(3, 4))
    assert [base.segment for base in held] == [text(3), text(4, tokens=3)]
    assert held.nbytes == 5 * PER_TOKEN
    state = held.digest(), held.version
    assert not held.put(text(5, tokens=7), RECIPE, random_kv(7, 5))  # larger than the whole pool: evicts nothing
    assert (held.digest(), held.version) == state


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=25))
def test_the_books_balance(steps: list[tuple[int, int, bool]]) -> None:
    held = pool(max_bytes=9 * PER_TOKEN, max_entries=4)
    for n, tokens, forget in steps:
        if forget:
            held.forget(text(n, tokens))
        else:
            held.put(text(n, tokens), RECIPE, random_kv(tokens, n))
        bases = list(held)
        assert held.nbytes == sum(base.kv.nbytes for base in bases) <= held.max_bytes
        assert len(held) == len(bases) <= held.max_entries
        for base in bases:
            assert held.bases(base.segment) == [base]


def test_a_child_reads_its_parent_and_writes_to_itself() -> None:
    parent = pool()
    parent.put(text(1), RECIPE, random_kv(2, 1))
    child, sibling = pool(parent=parent), pool(parent=parent)
    before = parent.digest(), parent.version
    found = child.get(text(1), RECIPE)
    assert found is not None and found.kv is next(iter(parent)).kv
    assert not child.put(text(1), RECIPE, random_kv(2, 9))  # held by the parent already
    child.put(text(1), OTHER, random_kv(2, 2))
    child.put(text(2), RECIPE, random_kv(2, 3))
    assert [base.recipe for base in child.bases(text(1))] == [RECIPE, OTHER]
    assert (parent.digest(), parent.version, len(parent)) == (*before, 1)
    assert len(sibling.bases(text(1))) == 1 and sibling.get(text(2), RECIPE) is None
    assert child.forget(text(1)) == 1  # the parent's stays
    assert len(child.bases(text(1))) == 1


def test_a_childs_version_moves_with_its_parents() -> None:
    parent = pool()
    child = pool(parent=pool(parent=parent))
    before = child.version
    parent.put(text(1), RECIPE, random_kv(2, 1))
    assert child.version != before and child.bases(text(1))


def test_token_ids_are_compared_behind_the_digest() -> None:
    """Two texts with one digest, as if SHA-256 had collided, are never taken for each other."""
    held, one, other = pool(), text(1), text(2)
    object.__setattr__(other, "digest", one.digest)
    held.put(one, RECIPE, random_kv(2, 1))
    assert held.bases(other) == [] and held.get(other, RECIPE) is None
    assert len(held.bases(one)) == 1


def test_forgetting_drops_every_recipe() -> None:
    held = pool()
    held.put(text(1), RECIPE, random_kv(2, 1))
    held.put(text(1), OTHER, random_kv(2, 2))
    held.put(text(2), RECIPE, random_kv(2, 3))
    version = held.version
    assert held.forget(text(1)) == 2 and held.forget(text(1)) == 0
    assert [base.segment for base in held] == [text(2)] and held.nbytes == 2 * PER_TOKEN
    assert held.version > version


def test_what_does_not_fit_the_fingerprint_is_refused() -> None:
    held = pool()
    half = SegmentKV(*(t.bfloat16() for t in (random_kv(2, 1).keys, random_kv(2, 1).values)))
    for segment, kv in ((text(1), half), (text(1, tokens=3), random_kv(2, 1))):
        with pytest.raises(InvalidInput, match="compute it again"):
            held.put(segment, RECIPE, kv)
    assert not held.put(Segment(()), RECIPE, SegmentKV(*(torch.zeros(3, 2, 0, 4) for _ in range(2))))
    assert len(held) == held.version == 0


def test_limits_and_parents_are_checked() -> None:
    for limits in ({"max_bytes": -1}, {"max_entries": -1}):
        with pytest.raises(InvalidInput, match="give 0 or more"):
            pool(**limits)
    for parent in (BasePool(Namespace("else"), FINGERPRINT), BasePool(HERE, replace(FINGERPRINT, weights="v"))):
        with pytest.raises(InvalidInput, match="parent's namespace and fingerprint"):
            pool(parent=parent)
    assert not pool(max_entries=0).put(text(1), RECIPE, random_kv(2, 1))
