"""A text that is nearly one of which a base is held: the right tokens are taken over, and what differs is computed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.match import Match, match
from kvcomm.anchors.pool import Base, BasePool
from kvcomm.errors import InvalidInput
from kvcomm.keys import Recipe
from kvcomm.reuse import policy as policies
from kvcomm.reuse.near import Near, gather, nearest
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Balanced, Fast, Policy, Reuse
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.run import keep, prepare
from kvcomm.reuse.select import Attended, Deviation, Leading, PredictedError, Selection
from kvcomm.reuse.splice import splice
from kvcomm.types import Namespace, Segment, SegmentKV
from tests.reuse.scene import (
    Chosen,
    backend_of,
    captured,
    dense,
    error,
    filled,
    one_by_one,
    state_error,
    state_of,
    tokens,
)

TOLERANCE = 2e-5
RECIPE = Recipe("prompt", "other/text", "somewhere", True)
HEAD, TAIL = tokens(12, 1), tokens(6, 2)
OLD = tokens(60, 3)
NEW = (*OLD[:20], 5, 6, *OLD[21:45], *OLD[47:])  # a token replaced by two, two deleted
ABSENT, AFTER = (32, 33), (34, 35, 36, 37, 58, 59, 60, 61)  # in the prompt, behind the head


def pool_of(family: str = "llama", held: tuple[int, ...] = OLD, recipe: Recipe = RECIPE, name: str = "a") -> BasePool:
    backend = backend_of(family)
    pool = BasePool(Namespace(name), backend.spec.fingerprint)
    pool.put(Segment(held), recipe, captured(backend, tokens(9, 4), held))
    return pool


def prompt_of(middle: tuple[int, ...] = NEW) -> Prompt:
    pieces = zip((HEAD, middle, TAIL), ("a/#0", "a/text", "a/#1"), strict=True)
    return Prompt(tuple(Part(Segment(ids), label) for ids, label in pieces))


def plan_of(policy: Policy, pool: BasePool | None = None, middle: tuple[int, ...] = NEW) -> Plan:
    pool = pool if pool is not None else pool_of()
    return policy.plan(prompt_of(middle), pool, OffsetBook(pool.fingerprint))


def test_the_plan_by_hand() -> None:
    plan = plan_of(Fast(near=0.8, dense_above=1.0))
    part = plan.parts[1]
    assert part.action == "approximate" and part.match is not None and part.base is not None
    assert (tuple(part.absent), part.recompute) == (ABSENT, AFTER)
    assert part.computed == sorted((*ABSENT, *AFTER))
    assert part.why == "2 of 59 tokens differ from a held text of 60, base from prompt of other/text"
    assert not part.base.recipe.exact and part.base.segment.token_ids == NEW
    counts = plan.counts  # head and tail are new
    assert (counts.exact, counts.approximate, counts.recomputed, counts.new) == (0, 49, 8, 12 + 2 + 6)
    assert plan.exact_until == 12 and "8 recomputed" in str(plan)
    assert plan_of(Fast(near=0.8, after_edit=1)).parts[1].recompute == (34, 58)
    assert plan_of(Fast(near=0.8, after_edit=0)).parts[1].recompute == ()


def test_positions_chosen_come_on_top() -> None:
    plan = plan_of(Fast(near=0.8)).recomputing((14, 32, 35, 200), 1.5)
    assert plan.parts[1].recompute == (14, *AFTER)
    assert plan.parts[1].computed == sorted((14, *ABSENT, *AFTER))
    assert plan.counts.total == len(plan.prompt) and plan.extra_tokens == 1.5
    assert plan.recomputing((), 0.0).parts == plan.parts


def test_how_near_is_a_field() -> None:
    assert plan_of(Fast(near=57 / 60)).parts[1].action == "approximate"
    assert plan_of(Fast(near=0.96)).parts[1].why == "no base held for this text"
    assert plan_of(Fast(near=1.0)).parts[1].action == "new"
    assert plan_of(Fast(origins=(("isolated",),))).parts[1].action == "new"
    for wrong in ({"near": 0.0}, {"near": 1.1}, {"near": float("nan")}, {"after_edit": -1}):
        for policy in (Reuse, Balanced, Fast):
            with pytest.raises(InvalidInput):
                policy(**wrong)


def test_a_base_of_its_own_comes_first() -> None:
    pool, backend = pool_of(), backend_of("llama")
    pool.put(Segment(NEW), RECIPE, captured(backend, (), NEW))
    part = plan_of(Fast(near=0.8), pool).parts[1]
    assert part.match is None and not part.absent and part.action == "approximate"


def test_exact_reuse_never_takes_a_near_text() -> None:
    """Not even where the held one stood behind the very same tokens."""
    before = prompt_of().preceding[1]
    pool = pool_of(recipe=replace(RECIPE, preceding=before))
    head = Segment(HEAD)
    pool.put(head, Recipe("prompt", "a/#0", prompt_of().preceding[0], True), captured(backend_of("llama"), (), HEAD))
    assert [part.action for part in plan_of(policies.Exact(), pool).parts] == ["exact", "new", "new"]
    assert [part.action for part in plan_of(Fast(near=0.8), pool).parts] == ["exact", "approximate", "new"]


def test_the_nearest_of_several_is_taken() -> None:
    pool, backend = pool_of(held=(*OLD[:-8], *tokens(8, 9))), backend_of("llama")
    pool.put(Segment(OLD), replace(RECIPE, context="nearer"), captured(backend, (), OLD))
    found = nearest(Segment((*OLD[:30], 5, *OLD[31:])), pool, 0.8, Reuse().choose)
    assert found is not None and found.base.recipe.context == "nearer" and found.match.absent == (30,)


def test_namespaces_and_parents() -> None:
    parent = pool_of()
    child = BasePool(parent.namespace, parent.fingerprint, parent=parent)
    other = BasePool(Namespace("b"), parent.fingerprint)
    assert plan_of(Fast(near=0.8), child).parts[1].action == "approximate"
    assert plan_of(Fast(near=0.8), other).parts[1].action == "new"
    before = parent.digest(), parent.version, len(parent)
    plan_of(Fast(near=0.8), child)
    assert (parent.digest(), parent.version, len(parent)) == before and len(child) == 0
    parent.forget(Segment(OLD))
    assert plan_of(Fast(near=0.8), child).parts[1].action == "new"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_gathered_kv_are_those_of_the_right_tokens(seed: int, edits: int) -> None:
    """Every value of the base names its token, so that a wrong one would show."""
    random, fingerprint = Random(seed), backend_of("llama").spec.fingerprint
    old = [random.randrange(1000) for _ in range(80)]
    new = list(old)
    for _ in range(edits):
        at = random.randrange(len(new) - 2)
        new[at : at + random.randrange(3)] = [2000 + n for n in range(random.randrange(3))]
    shape = (fingerprint.n_layers, fingerprint.n_kv_heads, 80, fingerprint.head_dim)
    named = torch.tensor(old, dtype=torch.float32)[None, None, :, None].expand(shape) + 1.0
    held = Base(Segment(tuple(old)), RECIPE, SegmentKV(named, -named))
    found = match(new, old)
    base = gather(Segment(tuple(new)), found, held)
    base.kv.check(fingerprint, len(new))
    absent = set(found.absent)
    for n, token in enumerate(new):
        expected = 0.0 if n in absent else token + 1.0
        assert bool((base.kv.keys[:, :, n] == expected).all()) and bool((base.kv.values[:, :, n] == -expected).all())


def test_gathering_refuses_a_match_of_other_texts() -> None:
    held = next(iter(pool_of()))
    for wrong in (Match((0, 1), 60), Match((0,) * 59, 59)):
        with pytest.raises(InvalidInput, match="match the texts"):
            gather(Segment(NEW), wrong, held)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen3", "mistral", "gemma3", "gpt_neox", "deepseek_v3"])
def test_what_is_computed_is_what_plain_torch_computes(family: str) -> None:
    """Splice by hand, recompute one token at a time behind an ordinary cache: the same logits and KV."""
    backend, pool = backend_of(family), pool_of(family)
    plan, buffer = prepare(
        backend, plan_of(Fast(near=0.8, dense_above=1.0), pool), Fast(near=0.8, dense_above=1.0), book_of(pool), 0
    )
    ids, start = plan.prompt.token_ids, buffer.length
    logits = backend.forward(buffer, ids[start:], range(start, len(ids)), logits=1)[-1]

    source = match(NEW, OLD).source
    held = next(iter(pool)).kv
    reference = filled(backend, ids)
    for n, at in enumerate(source):
        if at >= 0:
            one = SegmentKV(held.keys[:, :, at : at + 1], held.values[:, :, at : at + 1])
            splice(reference, backend.spec, one, 12 + n)
    state = state_of(reference, len(ids))
    computed = [p for p in range(len(ids)) if p < 12 or p >= 12 + len(NEW) or p in {*ABSENT, *AFTER}]
    expected = one_by_one(backend, ids, state, computed)
    assert error(logits, expected) < TOLERANCE
    assert state_error(state_of(buffer, len(ids)), state) < TOLERANCE


def book_of(pool: BasePool) -> OffsetBook:
    return OffsetBook(pool.fingerprint)


SELECTIONS: list[Selection] = [
    Leading(0),
    Leading(25),
    Chosen(ABSENT),
    Deviation(0.0),
    Deviation(0.3),
    PredictedError(0.2),
    Attended(0.2),
]


@pytest.mark.parametrize("select", SELECTIONS, ids=str)
def test_what_is_absent_is_never_seen_before_it_is_computed(select: Selection, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NaN in the place of what has no counterpart, every KV and logit comes out as without."""
    backend, pool = backend_of("llama"), pool_of()
    policy = Reuse(near=0.8, select=select, dense_above=1.0)
    results = []
    for poisoned in (False, True):
        if poisoned:
            monkeypatch.setattr(policies, "nearest", lambda *given: with_nan(nearest(*given)))
        plan, buffer = prepare(backend, plan_of(policy, pool), policy, book_of(pool), 0)
        assert {*ABSENT, *AFTER} <= set(plan.computed)
        assert plan.counts.total == len(plan.prompt) and plan.counts.new == 20
        start, ids = buffer.length, plan.prompt.token_ids
        logits = backend.forward(buffer, ids[start:], range(start, len(ids)), logits=1)[-1]
        if poisoned:
            assert plan.parts[1].base is not None and bool(plan.parts[1].base.kv.keys.isnan().any())
        results.append((logits, buffer.keys, buffer.values))
    for clean, poisoned_one in zip(*results, strict=True):
        assert bool(poisoned_one.isfinite().all()) and error(poisoned_one, clean) < TOLERANCE


def with_nan(found: Near | None) -> Near | None:
    if found is None:
        return None
    for tensor in (found.base.kv.keys, found.base.kv.values):
        tensor[:, :, list(found.match.absent)] = float("nan")
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4), st.booleans())
def test_all_recomputed_equals_dense(seed: int, edits: int, some: bool) -> None:
    """And whatever else is recomputed, the counts add up and what differs is among it."""
    random, backend, pool = Random(seed), backend_of("llama"), pool_of()
    middle = list(OLD)
    for _ in range(edits):
        at = random.randrange(len(middle) - 3)
        middle[at : at + random.randrange(3)] = [random.randrange(3, 128) for _ in range(random.randrange(3))]
    length = len(HEAD) + len(middle) + len(TAIL)
    chosen = tuple(p for p in range(length) if not some or random.random() < 0.3)
    policy = Reuse(near=0.8, select=Chosen(chosen), dense_above=1.0)
    plan, buffer = prepare(backend, plan_of(policy, pool, tuple(middle)), policy, book_of(pool), 0)
    part, counts = plan.parts[1], plan.counts
    assert counts.total == length == len(plan.prompt)
    assert counts.recomputed + counts.new == len(plan.computed)
    if part.match is not None:
        assert counts.new == 18 + len(part.match.absent) and set(part.absent) <= set(plan.computed)
    if not some:
        start, ids = buffer.length, plan.prompt.token_ids
        logits = backend.forward(buffer, ids[start:], range(start, len(ids)), logits=1)[-1]
        expected, state = dense(backend, ids)
        assert plan.exact_until == length
        assert error(logits, expected[-1]) < TOLERANCE
        assert state_error(state_of(buffer, length), state) < TOLERANCE


def test_where_little_would_be_saved_all_is_dense() -> None:
    backend, pool = backend_of("llama"), pool_of()
    policy = Fast(near=0.8, dense_above=0.2)
    plan, _ = prepare(backend, plan_of(policy, pool), policy, book_of(pool), 0)
    assert plan.counts.new == len(plan.prompt) and plan.parts[1].match is None and "dense" in plan.why


def test_no_copy_of_a_copy_is_kept() -> None:
    backend, pool = backend_of("llama"), pool_of()
    policy = Fast(near=0.8, dense_above=1.0)
    plan, buffer = prepare(backend, plan_of(policy, pool), policy, book_of(pool), 0)
    ids = plan.prompt.token_ids
    backend.forward(buffer, ids[buffer.length :], range(buffer.length, len(ids)), logits=0)
    keep(pool, backend, buffer, plan, every_exact=False)
    assert not pool.bases(Segment(NEW)) and pool.bases(Segment(HEAD))


@pytest.mark.parametrize("middle", [(), (7,), (7,) * 60, tokens(60, 30), OLD[:20], (*OLD, *OLD)], ids=len)
def test_texts_that_are_not_near(middle: tuple[int, ...]) -> None:
    part = plan_of(Fast(near=0.8), middle=middle).parts[1]
    assert part.match is None and part.action == ("new" if middle else "exact")


def test_a_part_with_nothing_left_to_take_over() -> None:
    """Every token in common stands behind an edit: all are computed, none counts as reused."""
    policy = Fast(near=0.8, after_edit=100, dense_above=1.0)
    middle = OLD[1:]
    backend, pool = backend_of("llama"), pool_of()
    plan, buffer = prepare(backend, plan_of(policy, pool, middle), policy, book_of(pool), 0)
    assert plan.counts.approximate == 0 and len(plan.computed) == len(plan.prompt)
    assert plan.exact_until == len(plan.prompt) and buffer.length == 0
