"""The book predicts before it learns, shrinks by what that was worth, and applies nothing that would harm."""

from __future__ import annotations

import math

import pytest
import torch

from kvcomm.anchors.book import Gain, Observation, OffsetBook
from kvcomm.anchors.offset import LinearOffset, MeanOffset, NoOffset
from kvcomm.anchors.statistics import OffsetStatistics, Pair, features
from kvcomm.errors import InvalidInput
from kvcomm.types import SegmentKV
from tests.anchors.synthetic import DIM, FINGERPRINT, HEADS, LAYERS, WIDTH, offset_of, plus, random_kv

PAIR, UNSEEN = Pair("prompt", "coder/task", "critic/task"), Pair("prompt", "coder/task", "nobody/task")
ONE = torch.ones(LAYERS - 1, HEADS, 1, WIDTH)


def shifted(seed: int, by: torch.Tensor | float, tokens: int = 4, pair: Pair = PAIR) -> Observation:
    base = random_kv(tokens, seed)
    return Observation(pair, base, plus(base, (ONE * by).expand(-1, -1, tokens, -1)))


def test_gain_by_hand() -> None:
    gain = Gain(LAYERS - 1)
    predicted = torch.zeros(LAYERS - 1, HEADS, 1, WIDTH)
    observed = torch.zeros_like(predicted)
    predicted[0, 0, 0, :2], observed[0, 0, 0, :2] = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])  # keys
    predicted[0, 1, 0, DIM], observed[0, 1, 0, DIM] = 1.0, 3.0  # values, too short: never stretched
    predicted[1, 0, 0, 0], observed[1, 0, 0, 0] = 1.0, -1.0  # wrong way
    gain.test(predicted, observed)
    torch.testing.assert_close(gain.factor, torch.tensor([[3 / 5, 1.0], [0.0, 0.0]], dtype=torch.float64))
    explained = (2 * 0.6 * 3 - 0.36 * 5) + (2 * 1 * 3 - 1)
    assert gain.explained == pytest.approx(explained / (2 + 9 + 1))
    gain.test(predicted, predicted)
    torch.testing.assert_close(gain.factor[0, 0], torch.tensor(8 / 10, dtype=torch.float64))
    assert gain.calls == 2
    total = Gain(LAYERS - 1)
    total.add(gain)
    total.add(gain)
    torch.testing.assert_close(total.factor, gain.factor)
    assert Gain(1).explained == 0.0


def test_it_predicts_before_it_learns() -> None:
    """The first call tests nothing; the second is tested against what the first taught, and not against itself."""
    book = OffsetBook(FINGERPRINT, MeanOffset())
    book.learn([shifted(1, 1.0)])
    assert not book.gains and book.estimate(PAIR, random_kv(4, 9)) is None
    book.learn([shifted(2, 3.0)])
    gain = book.gains[PAIR]
    assert gain.calls == 1
    torch.testing.assert_close(gain.agreement / gain.predicted, torch.full((LAYERS - 1, 2), 3.0, dtype=torch.float64))
    estimate = book.estimate(PAIR, random_kv(4, 9))
    assert estimate is not None
    torch.testing.assert_close(features(estimate), (2 * ONE).expand(-1, -1, 4, -1))  # mean of 1 and 3, factor 1


def test_observations_of_one_call_do_not_teach_each_other() -> None:
    book = OffsetBook(FINGERPRINT, MeanOffset())
    book.learn([shifted(1, 1.0), shifted(2, 1.0)])
    assert not book.gains


def test_an_estimate_is_shrunk_by_its_gain() -> None:
    book = OffsetBook(FINGERPRINT, MeanOffset())
    book.learn([shifted(1, 4.0)])
    book.learn([shifted(2, 1.0)])  # 4 was predicted: factor 1/4; the mean is now 2.5
    estimate = book.estimate(PAIR, random_kv(4, 9))
    assert estimate is not None
    torch.testing.assert_close(features(estimate), (0.625 * ONE).expand(-1, -1, 4, -1))
    assert float(estimate.keys[0].abs().sum()) == float(estimate.values[0].abs().sum()) == 0.0
    assert book.explained(PAIR) == pytest.approx((2 / 4 * 4 - 1 / 16 * 16) / 1)


@pytest.mark.parametrize("estimator", [MeanOffset(), LinearOffset()])
def test_an_offset_that_would_harm_is_not_applied(estimator: MeanOffset | LinearOffset) -> None:
    """Offsets that turn round at each call: what was learned always points the wrong way."""
    book = OffsetBook(FINGERPRINT, estimator)
    for n in range(6):
        book.learn([shifted(n, 1.0 if n % 2 else -1.0)])
    assert book.gains[PAIR].calls == 5
    estimate = book.estimate(PAIR, random_kv(4, 9))
    assert estimate is None or float(features(estimate).abs().max()) < 0.2
    helped, harmed = 0.0, 0.0
    for n in (6, 7):
        seen = shifted(n, 1.0 if n % 2 else -1.0)
        true = offset_of(seen.base, seen.true)
        guess = book.estimate(PAIR, seen.base)
        helped += float((true**2).sum())
        harmed += float(((true - features(guess).double()) ** 2).sum()) if guess else float((true**2).sum())
    assert harmed <= 1.02 * helped


def test_a_helpful_layer_is_applied_and_a_harmful_one_not() -> None:
    book = OffsetBook(FINGERPRINT, MeanOffset())
    for n in range(5):
        by = ONE.clone()
        by[1] *= 1.0 if n % 2 else -1.0
        book.learn([shifted(n, by)])
    estimate = book.estimate(PAIR, random_kv(4, 9))
    assert estimate is not None
    assert float(estimate.keys[1].mean()) == pytest.approx(1.0) and float(estimate.keys[2].abs().max()) == 0.0


def test_a_pair_never_tested_takes_the_gain_over_all() -> None:
    book = OffsetBook(FINGERPRINT, LinearOffset())
    for n in range(8):
        book.learn([shifted(n, 1.0)])
    estimate = book.estimate(UNSEEN, random_kv(4, 99))
    assert estimate is not None and float(features(estimate).mean()) == pytest.approx(1.0, abs=0.1)
    assert OffsetBook(FINGERPRINT, MeanOffset()).estimate(UNSEEN, random_kv(4, 99)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_estimate_has_its_bases_dtype(dtype: torch.dtype) -> None:
    book = OffsetBook(FINGERPRINT, LinearOffset())
    for n in range(4):
        book.learn([shifted(n, 1.0)])
    base = random_kv(4, 9)
    estimate = book.estimate(PAIR, SegmentKV(base.keys.to(dtype), base.values.to(dtype)))
    assert estimate is not None and estimate.keys.dtype == dtype and estimate.keys.shape == base.keys.shape


def test_nothing_is_estimated_for_no_tokens_or_without_an_estimator() -> None:
    book = OffsetBook(FINGERPRINT, NoOffset())
    for n in range(3):
        book.learn([shifted(n, 1.0)])
    assert book.estimate(PAIR, random_kv(4, 9)) is None
    book.estimator = MeanOffset()  # the statistics serve another estimator; its own gain has yet to be measured
    assert book.estimate(PAIR, random_kv(4, 9)) is None
    book.learn([shifted(3, 1.0)])
    assert book.estimate(PAIR, random_kv(4, 9)) is not None
    assert book.estimate(PAIR, SegmentKV(*(torch.zeros(LAYERS, HEADS, 0, DIM) for _ in range(2)))) is None


def test_a_bad_observation_leaves_the_book_as_it_was() -> None:
    book = OffsetBook(FINGERPRINT)
    for n in range(3):
        book.learn([shifted(n, 1.0)])
    bad = shifted(4, 1.0)
    bad.true.keys[1, 0, 0, 0] = math.nan
    before = book.statistics.digest(), book.gains[PAIR].calls
    with pytest.raises(InvalidInput, match="NaN"):
        book.learn([shifted(3, 1.0), bad])
    assert (book.statistics.digest(), book.gains[PAIR].calls) == before


def test_it_solves_again_only_when_it_learned() -> None:
    solved = []

    class Counting(LinearOffset):
        def solve(self, statistics: OffsetStatistics) -> object:  # type: ignore[override]
            solved.append(1)
            return super().solve(statistics)

    book = OffsetBook(FINGERPRINT, Counting())  # type: ignore[arg-type]
    for n in range(2):
        book.learn([shifted(n, 1.0)])
    book.estimate(PAIR, random_kv(4, 9))
    count = len(solved)
    for _ in range(3):
        book.estimate(PAIR, random_kv(4, 9))
    assert len(solved) == count


def test_calls_at_a_place_are_counted() -> None:
    book = OffsetBook(FINGERPRINT)
    elsewhere = Pair("decode", "tester/reply", "critic/task")
    book.learn([shifted(1, 1.0), shifted(2, 1.0, pair=elsewhere), shifted(3, 1.0, pair=UNSEEN)])
    book.learn([shifted(4, 1.0, tokens=30)])
    assert (book.calls("critic/task"), book.calls("nobody/task"), book.calls("coder/task")) == (3, 1, 0)


@pytest.mark.parametrize("pair", [PAIR, UNSEEN])
def test_a_linear_offset_not_applied_yet_is_the_estimate(pair: Pair) -> None:
    book = OffsetBook(FINGERPRINT, LinearOffset())
    for n in range(6):
        book.learn([shifted(n, 1.0)])
    base = random_kv(40, 9)
    mapped, estimate = book.linear(pair, base), book.estimate(pair, base)
    assert mapped is not None and mapped.factor is not None and estimate is not None
    y = features(base) @ mapped.weights.float() + mapped.intercept[:, :, mapped.buckets]
    y = y * mapped.factor[:, None, None].repeat_interleave(DIM, -1)
    assert float((y - features(estimate)).norm() / features(estimate).norm()) < 2**-7  # weights may be bfloat16


def test_nothing_but_a_linear_offset_that_helps_is_a_map() -> None:
    book = OffsetBook(FINGERPRINT, MeanOffset())
    assert book.linear(PAIR, random_kv(4, 9)) is None
    for n in range(4):
        book.learn([shifted(n, 1.0)])
    assert book.estimate(PAIR, random_kv(4, 9)) is not None and book.linear(PAIR, random_kv(4, 9)) is None
    harmful = OffsetBook(FINGERPRINT, LinearOffset())
    assert harmful.linear(PAIR, random_kv(4, 9)) is None
    harmful.learn([shifted(0, 1.0)])
    assert harmful.linear(PAIR, random_kv(4, 9)) is None  # never tested
    assert book.linear(PAIR, SegmentKV(*(torch.zeros(LAYERS, HEADS, 0, DIM) for _ in range(2)))) is None
