"""Sums of observations: buckets, a naive loop as oracle, addition across processes, what is refused and forgotten."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.anchors.statistics import OffsetStatistics, Pair, bucket_count, bucket_of, features
from kvcomm.errors import InvalidInput
from kvcomm.types import SegmentKV
from tests.anchors.synthetic import DIM, HEADS, LAYERS, WIDTH, random_kv

A, B = Pair("prompt", "coder/task", "critic/task"), Pair("decode", "coder/reply", "critic/plan")


def empty() -> OffsetStatistics:
    return OffsetStatistics(LAYERS, HEADS, DIM)


def same(one: OffsetStatistics, other: OffsetStatistics) -> None:
    """All sums equal but for the order of float64 additions."""
    assert one.pairs.keys() == other.pairs.keys()
    close = {"rtol": 1e-11, "atol": 1e-11}
    for name in ("xx", "xy", "yy"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), **close)
    for pair, sums in one.pairs.items():
        for name in ("calls", "tokens", "x", "y"):
            torch.testing.assert_close(getattr(sums, name), getattr(other.pairs[pair], name), **close)


def test_buckets_by_hand() -> None:
    assert bucket_of(torch.arange(18)).tolist() == [*range(16), 16, 16]
    edges = {16: 16, 19: 16, 20: 17, 22: 17, 23: 18, 26: 18, 27: 19, 31: 19, 32: 20, 64: 24, 128: 28, 1024: 40}
    assert {i: int(bucket_of(torch.tensor([i]))[0]) for i in edges} == edges
    assert [bucket_count(n) for n in (0, 1, 16, 17, 32, 33)] == [1, 1, 16, 17, 20, 21]


def test_buckets_never_go_back_or_skip() -> None:
    buckets = bucket_of(torch.arange(20000))
    assert set(buckets.diff().tolist()) == {0, 1}
    assert bucket_count(20000) == int(buckets[-1]) + 1


def test_sums_equal_a_naive_loop() -> None:
    statistics = empty()
    observed = [
        (A, random_kv(5, 1), random_kv(5, 2)),
        (A, random_kv(40, 3), random_kv(40, 4)),
        (B, random_kv(1, 5), random_kv(1, 6)),
    ]
    for seen in observed:
        statistics.observe(*seen)
    assert statistics.version == 3
    oracle = empty()
    for pair, base, true in observed:
        x = features(base).double()
        y = features(true).double() - x
        for layer, head, t in itertools.product(range(LAYERS - 1), range(HEADS), range(len(base))):
            vx, vy = x[layer, head, t], y[layer, head, t]
            oracle.xx[layer, head] += vx.outer(vx)
            oracle.xy[layer, head] += vx.outer(vy)
            oracle.yy[layer, head] += vy * vy
            bucket = t if t < 16 else 16 + math.floor(4 * math.log2(t / 16))
            sums = statistics.pairs[pair]
            held = oracle.pairs.setdefault(pair, type(sums)(LAYERS - 1, HEADS, WIDTH))
            held.grow(bucket + 1)
            held.x[layer, head, bucket] += vx
            held.y[layer, head, bucket] += vy
            held.tokens[bucket] += layer == head == 0
        held.calls[: bucket + 1] += 1
    same(statistics, oracle)
    assert statistics.xx.dtype == torch.float64
    assert statistics.nbytes > 3 * WIDTH * 8


def test_features_leave_the_first_layer_out() -> None:
    kv = random_kv(3, 1)
    found = features(kv)
    assert found.shape == (LAYERS - 1, HEADS, 3, WIDTH)
    assert torch.equal(found[0, 1, 2], torch.cat([kv.keys[1, 1, 2], kv.values[1, 1, 2]]))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 40), st.integers(0, 2)), max_size=6), st.randoms())
def test_merging_is_free_of_order_and_adds(calls: list[tuple[Pair, int, int]], rng: object) -> None:
    """Observations spread over three processes, merged in any order, are those of one process."""
    one, parts = empty(), [empty(), empty(), empty()]
    for seed, (pair, tokens, process) in enumerate(calls):
        seen = pair, random_kv(tokens, seed), random_kv(tokens, 1000 + seed)
        one.observe(*seen)
        parts[process].observe(*seen)
    rng.shuffle(parts)  # type: ignore[attr-defined]
    merged = empty()
    for part in parts:
        before = part.digest()
        merged.merge(part)
        assert part.digest() == before
    same(one, merged)


def test_merging_does_not_alias() -> None:
    source, target = empty(), empty()
    source.observe(A, random_kv(3, 1), random_kv(3, 2))
    target.merge(source)
    before = source.digest()
    target.observe(A, random_kv(3, 3), random_kv(3, 4))
    assert source.digest() == before != target.digest()


def test_merging_refuses_another_shape() -> None:
    with pytest.raises(InvalidInput, match="differently shaped"):
        empty().merge(OffsetStatistics(LAYERS, HEADS, DIM + 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_what_is_not_finite_is_refused_and_nothing_added(bad: float, which: str) -> None:
    statistics = empty()
    statistics.observe(A, random_kv(4, 1), random_kv(4, 2))
    before = statistics.digest(), statistics.version
    base, true = random_kv(4, 3), random_kv(4, 4)
    getattr(true, which)[1, 0, 2, 1] = bad
    for seen in ((B, base, true), (B, true, base)):
        with pytest.raises(InvalidInput, match="NaN or infinity"):
            statistics.observe(*seen)
    with pytest.raises(InvalidInput, match="differ in shape"):
        statistics.observe(B, random_kv(4, 1), random_kv(5, 1))
    assert (statistics.digest(), statistics.version) == before
    assert B not in statistics.pairs


def test_nothing_is_learned_from_no_tokens() -> None:
    statistics = empty()
    nothing = SegmentKV(torch.zeros(LAYERS, HEADS, 0, DIM), torch.zeros(LAYERS, HEADS, 0, DIM))
    statistics.observe(A, nothing, nothing)
    assert statistics.version == 0 and not statistics.pairs


def test_forgetting_drops_the_means_and_keeps_what_the_map_learned_centred() -> None:
    """What stays of a forgotten pair is the scatter about its means: its means are in no sum any more."""
    statistics, kept = empty(), empty()
    forgotten = [(random_kv(6, n), random_kv(6, 50 + n)) for n in range(4)]
    for base, true in forgotten:
        statistics.observe(A, base, true)
    for target in (statistics, kept):
        target.observe(B, random_kv(6, 90), random_kv(6, 91))
    before = statistics.version
    assert statistics.forget("critic/task") == 1
    assert statistics.pairs.keys() == {B} and statistics.version > before
    xs = torch.stack([features(base).double() for base, _ in forgotten])  # [calls, layers - 1, heads, T, F]
    ys = torch.stack([features(true).double() for _, true in forgotten]) - xs
    dx, dy = xs - xs.mean(0), ys - ys.mean(0)
    torch.testing.assert_close(statistics.xx, kept.xx + torch.einsum("nlhti,nlhtj->lhij", dx, dx))
    torch.testing.assert_close(statistics.xy, kept.xy + torch.einsum("nlhti,nlhtj->lhij", dx, dy))
    torch.testing.assert_close(statistics.yy, kept.yy + (dy * dy).sum((0, 3)))
    assert statistics.forget("nowhere") == 0


def test_the_digest_sees_every_sum_and_which_pair_it_belongs_to() -> None:
    def of(pair: Pair, seed: int = 1) -> str:
        statistics = empty()
        statistics.observe(pair, random_kv(3, seed), random_kv(3, 9))
        return statistics.digest()

    pairs = [A, B, Pair("prompt", "a->b", "c"), Pair("prompt", "a", "b->c"), Pair("prompt", "b->c", "a")]
    assert len({of(pair) for pair in pairs} | {of(A, seed=2)}) == len(pairs) + 1
    assert of(A) == of(A)


def test_a_model_needs_layers() -> None:
    with pytest.raises(InvalidInput, match="0 layers"):
        OffsetStatistics(0, 1, 1)
