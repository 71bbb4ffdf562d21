"""Estimators recover laws that the data was made with; the ridge map is a direct least-squares solution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcomm.anchors.offset import LinearOffset, MeanOffset, NoOffset, OffsetEstimator
from kvcomm.anchors.statistics import OffsetStatistics, Pair, features
from kvcomm.types import SegmentKV
from tests.anchors.synthetic import DIM, HEADS, LAYERS, WIDTH, law, offset_of, plus, random_kv

PAIR, OTHER, UNSEEN = (Pair("prompt", "coder/task", f"{name}/task") for name in ("critic", "tester", "nobody"))
TOLERANCE = 2e-5
"""Estimates are float32 and of order one; their sums are float64."""


def observed(calls: list[tuple[Pair, SegmentKV, SegmentKV]]) -> OffsetStatistics:
    statistics = OffsetStatistics(LAYERS, HEADS, DIM)
    for call in calls:
        statistics.observe(*call)
    return statistics


def linear_calls(pair: Pair, shift: float, count: int, tokens: int = 24) -> list[tuple[Pair, SegmentKV, SegmentKV]]:
    """Calls whose offsets follow one linear law, and a constant that belongs to the pair."""
    weights, constant = law()
    bases = [random_kv(tokens, int(100 * shift) + n) for n in range(count)]
    return [(pair, base, plus(base, features(base) @ weights + constant + shift)) for base in bases]


@pytest.mark.parametrize("estimator", [NoOffset(), MeanOffset(), LinearOffset()])
def test_nothing_is_said_before_anything_was_seen(estimator: OffsetEstimator) -> None:
    assert estimator.solve(observed([])) is None


def test_no_offset_says_nothing() -> None:
    assert NoOffset().solve(observed(linear_calls(PAIR, 0.0, 2))) is None


def test_mean_by_hand() -> None:
    calls = [(PAIR, random_kv(n, n), random_kv(n, 50 + n)) for n in (2, 3, 3)]
    predictor = MeanOffset().solve(observed(calls))
    assert predictor is not None
    found = predictor.predict(PAIR, random_kv(3, 99))
    offsets = [offset_of(base, true) for _, base, true in calls]
    for t, seen in ((0, offsets), (1, offsets), (2, offsets[1:])):
        by_hand = torch.stack([offset[:, :, t] for offset in seen]).mean(0)
        torch.testing.assert_close(found[:, :, t].double(), by_hand, rtol=0, atol=1e-6)  # type: ignore[index]
    assert predictor.predict(UNSEEN, random_kv(3, 99)) is None


def test_mean_goes_on_with_the_last_bucket_beyond_what_was_seen() -> None:
    predictor = MeanOffset().solve(observed([(PAIR, random_kv(18, 1), random_kv(18, 2))]))
    found = predictor.predict(PAIR, random_kv(200, 3))  # type: ignore[union-attr]
    assert found is not None and found.shape == (LAYERS - 1, HEADS, 200, WIDTH)
    offset = offset_of(random_kv(18, 1), random_kv(18, 2))
    torch.testing.assert_close(found[:, :, 150].double(), offset[:, :, 16:].mean(2), rtol=0, atol=1e-6)
    assert torch.equal(found[:, :, 199], found[:, :, 16])


def test_linear_recovers_the_law() -> None:
    predictor = LinearOffset(ridge=1e-9, prior_calls=0.0).solve(
        observed([*linear_calls(PAIR, 0.0, 30), *linear_calls(OTHER, 2.0, 30)])
    )
    assert predictor is not None
    for pair, shift in ((PAIR, 0.0), (OTHER, 2.0)):
        _, base, true = linear_calls(pair, shift + 50, 1, tokens=300)[0]  # texts and lengths never seen
        expected = offset_of(base, true) - 50.0
        found = predictor.predict(pair, base)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=50 * TOLERANCE)  # type: ignore[union-attr]


def test_ridge_is_lstsq_on_centred_data() -> None:
    """Deviations from each (pair, index)'s mean, with rows of sqrt(ridge * scale) appended: the textbook's ridge."""
    ridge = 0.1
    calls = [
        (p, random_kv(6, 10 * k + n), random_kv(6, 500 + 10 * k + n))
        for k, p in enumerate((PAIR, OTHER))
        for n in range(5)
    ]
    predictor = LinearOffset(ridge=ridge).solve(observed(calls))
    for layer in range(LAYERS - 1):
        for head in range(HEADS):
            xs, ys = [], []
            for pair in (PAIR, OTHER):
                x = torch.stack([features(b)[layer, head].double() for p, b, _ in calls if p == pair])
                y = torch.stack([offset_of(b, t)[layer, head] for p, b, t in calls if p == pair])
                xs.append((x - x.mean(0)).reshape(-1, WIDTH))
                ys.append((y - y.mean(0)).reshape(-1, WIDTH))
            x, y = torch.cat(xs), torch.cat(ys)
            penalty = (ridge * (x * x).sum() / WIDTH).sqrt() * torch.eye(WIDTH, dtype=torch.float64)
            oracle = torch.linalg.lstsq(torch.cat([x, penalty]), torch.cat([y, torch.zeros_like(penalty)])).solution
            found = predictor.weights[layer, head].double()  # type: ignore[union-attr]
            torch.testing.assert_close(found, oracle, rtol=0, atol=1e-6)


def test_a_pair_never_seen_takes_what_all_pairs_share() -> None:
    predictor = LinearOffset(ridge=1e-9).solve(observed([*linear_calls(PAIR, -1.0, 20), *linear_calls(OTHER, 1.0, 20)]))
    _, base, true = linear_calls(UNSEEN, 0.0, 1)[0]
    found = predictor.predict(UNSEEN, base)  # type: ignore[union-attr]
    assert found is not None
    torch.testing.assert_close(found.double(), offset_of(base, true), rtol=0, atol=0.2)  # mean of -1 and 1 is near 0


def test_a_pair_seen_once_leans_on_all_pairs() -> None:
    many, once = linear_calls(OTHER, 0.0, 40), linear_calls(PAIR, 4.0, 1)
    _, base, true = linear_calls(PAIR, 4.0, 3)[2]
    errors = []
    for prior in (0.0, 1.0, 1e9):
        found = LinearOffset(ridge=1e-9, prior_calls=prior).solve(observed([*many, *once])).predict(PAIR, base)  # type: ignore[union-attr]
        errors.append(float((offset_of(base, true) - found.double()).mean()))  # type: ignore[union-attr]
    own, half, shared = errors
    assert own == pytest.approx(0.0, abs=0.05)
    assert half == pytest.approx(shared / 2, abs=0.1)
    assert shared == pytest.approx(4.0, abs=0.3)


def test_a_longer_segment_than_any_seen() -> None:
    predictor = LinearOffset().solve(observed(linear_calls(PAIR, 0.0, 10, tokens=5)))
    base = random_kv(1000, 3)
    found = predictor.predict(PAIR, base)  # type: ignore[union-attr]
    assert found is not None and bool(found.isfinite().all())
    same = SegmentKV(base.keys[:, :, 400:405], base.values[:, :, 400:405])
    torch.testing.assert_close(found[:, :, 404], predictor.predict(PAIR, same)[:, :, 4])  # type: ignore[union-attr,index]


def test_forgetting_a_pair_leaves_the_shared_map_right() -> None:
    """Also where the forgotten pair's means were far from zero."""
    far = [
        (p, SegmentKV(b.keys + 20, b.values + 20), SegmentKV(t.keys + 33, t.values + 33))
        for p, b, t in linear_calls(OTHER, 0.0, 20)
    ]
    statistics = observed([*linear_calls(PAIR, 0.0, 20), *far])
    estimator = LinearOffset(ridge=1e-9)
    before = estimator.solve(statistics)
    statistics.forget("tester/task")
    after = estimator.solve(statistics)
    torch.testing.assert_close(after.weights, before.weights, rtol=0, atol=1e-4)  # type: ignore[union-attr]


def test_degenerate_data_gives_finite_maps() -> None:
    """Fewer tokens than features, or the same token again and again."""
    base = random_kv(1, 1)
    for calls in (
        [(PAIR, base, random_kv(1, 2))],
        [(PAIR, base, plus(base, torch.ones(LAYERS - 1, HEADS, 1, WIDTH)))] * 5,
    ):
        found = LinearOffset().solve(observed(calls)).predict(PAIR, base)  # type: ignore[union-attr]
        assert found is not None and bool(found.isfinite().all())


def test_estimators_are_values() -> None:
    assert LinearOffset() == LinearOffset() != replace(LinearOffset(), ridge=0.5)
