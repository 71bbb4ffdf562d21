"""Intervals and tests against cases worked out by hand, against scipy's own, and against what intervals promise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from eval.figures import statistics
from kvcomm.errors import InvalidInput


def test_mcnemar_by_hand() -> None:
    # 5 prompts only dense solves, 1 only the method: 2 * (C(6,0) + C(6,1)) / 2^6 = 14/64
    dense = [True] * 5 + [False] + [True] * 3 + [False] * 2
    method = [False] * 5 + [True] + [True] * 3 + [False] * 2
    assert statistics.mcnemar(dense, method) == pytest.approx(14 / 64)
    assert statistics.mcnemar(method, dense) == pytest.approx(14 / 64)
    assert statistics.mcnemar([True, False], [True, False]) == 1.0
    assert statistics.mcnemar([True, False], [False, True]) == 1.0


def test_interval_of_two_prompts_by_hand() -> None:
    # resamples of {0, 1}: means 0, 1/2, 1 with 1/4, 1/2, 1/4; more than the middle 95 % reaches from 0 to 1
    found = statistics.mean([0.0, 1.0])
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.0, 1.0, 2)


def expanded(n: int) -> float:
    """The percentile interval's level that Hesterberg gives for 95 % from n values, written out once more."""
    return float(1 - 2 * stats.norm.cdf(-stats.t.ppf(0.975, n - 1) * (n / (n - 1)) ** 0.5))


def test_levels_by_hand() -> None:
    # t of 3 degrees of freedom at 97.5 % is 3.182; by sqrt(4/3) 3.675, of which the normal tail is 0.000119
    assert statistics.tail(4) == pytest.approx(0.000119, rel=0.01)
    assert statistics.tail(10_000) == pytest.approx(0.025, rel=0.001)
    assert expanded(12) == pytest.approx(1 - 2 * statistics.tail(12))


def test_interval_is_scipys() -> None:
    values = np.random.default_rng(3).normal(size=12)
    own = stats.bootstrap(
        [values], np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0), batch=1_000,
        confidence_level=expanded(12),
    ).confidence_interval  # fmt: skip
    found = statistics.mean(values.tolist())
    assert (found.low, found.high) == pytest.approx((own.low, own.high))


def test_paired_prompts_are_resampled_together() -> None:
    slow = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = statistics.ratio_of_medians(slow, [t / 2 for t in slow])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    shifted = statistics.mean_difference(slow, [t + 0.25 for t in slow])
    assert (shifted.value, shifted.low, shifted.high) == pytest.approx((0.25, 0.25, 0.25))


@pytest.mark.parametrize("k", range(8))
def test_interval_of_a_share_is_wilsons(k: int) -> None:
    own = stats.binomtest(k, 7).proportion_ci(method="wilson")
    found = statistics.share([1.0] * k + [0.0] * (7 - k))
    assert (found.value, found.low, found.high, found.n) == pytest.approx((k / 7, own.low, own.high, 7))


def test_shares_that_never_vary_have_an_interval() -> None:
    # 4 of 4: the lower limit is 4 / (4 + 1.96^2) = 0.51
    found = statistics.share([1.0] * 4)
    assert (found.low, found.high) == pytest.approx((4 / (4 + 3.8415), 1.0), rel=1e-4)
    assert statistics.share([0.0] * 4).high == pytest.approx(1 - 4 / (4 + 3.8415), rel=1e-4)
    assert statistics.share([0.5, 1.0, 1.0]).value == pytest.approx(2.5 / 3)
    assert (statistics.share([1.0]).low, statistics.share([1.0]).high) == (1.0, 1.0)
    for wrong in ([], [0.5, 1.5], [float("nan")]):
        with pytest.raises(InvalidInput, match="no shares"):
            statistics.share(wrong)


def test_interval_of_a_difference_of_shares_by_hand() -> None:
    # of 8 prompts 1 is won, 3 are lost: -2 / 10, and 1.96 * sqrt(4 + 1 - 4 / 10) / 10
    before, after = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    found = statistics.share_difference(before, after)
    reach = 1.96 * 4.6**0.5 / 10
    assert (found.value, found.low, found.high) == pytest.approx((-0.25, -0.2 - reach, -0.2 + reach), rel=1e-4)
    same = statistics.share_difference([0.0] * 4, [0.0] * 4)  # 1.96 / 6
    assert (same.value, same.low, same.high, same.n) == pytest.approx((0.0, -0.32666, 0.32666, 4), rel=1e-4)
    all_won = statistics.share_difference([0.0] * 20, [1.0] * 20)
    assert (all_won.value, all_won.high) == (1.0, 1.0) and 0.7 < all_won.low < 1
    with pytest.raises(InvalidInput, match="no shares"):
        statistics.share_difference([0.0], [2.0])


def test_no_figure_is_infinite_or_undefined() -> None:
    nan = float("nan")
    with pytest.raises(InvalidInput, match=r"0.0 among the values to divide by"):
        statistics.ratio_of_medians([1.0, 2.0], [0.0, 1.0])
    with pytest.raises(InvalidInput, match="finite"):
        statistics.bootstrap([0.0], [1.0], statistic=lambda a, b, axis: 1 - b.sum(axis) / a.sum(axis))
    for figure in (statistics.mean, lambda v: statistics.percentile([v, v], 50), lambda v: statistics.mean([*v, 2.0])):
        with pytest.raises(InvalidInput, match="nan among the values"):
            figure([nan])
    with pytest.raises(InvalidInput, match="nan among the values"):
        statistics.rank_correlation([1.0, 2.0, nan], [1.0, 2.0, 3.0])


def test_percentiles_by_hand_and_by_whole_groups() -> None:
    values = [float(n) for n in range(1, 101)]
    assert statistics.percentile([[v] for v in values], 99).value == pytest.approx(99.01)
    assert statistics.percentile([values], 50).value == pytest.approx(50.5)
    found = statistics.percentile([[1.0, 1.0], [3.0, 3.0]], 50)
    assert (found.value, found.low, found.high, found.n) == (2.0, 1.0, 3.0, 2)


def test_one_prompt_has_no_interval() -> None:
    found = statistics.mean([0.25])
    assert (found.low, found.high, found.n) == (0.25, 0.25, 1)


def test_rank_correlation() -> None:
    assert statistics.rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    # ranks 1 2 3 against 3 1 2: 1 - 6 * (4 + 1 + 1) / (3 * 8) = -1/2
    assert statistics.rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert statistics.rank_correlation([1, 1, 1], [3, 1, 2]) is None


def test_rows_of_a_prompt_count_once() -> None:
    rows = [{"case": "a", "kl": 1.0}, {"case": "a", "kl": 3.0}, {"case": "b", "kl": 8.0}]
    assert statistics.by_prompt(rows, "kl") == {"a": 2.0, "b": 8.0}


@pytest.mark.parametrize("samples", [([],), ([1.0, 2.0], [1.0])])
def test_samples_that_do_not_fit_are_named(samples: tuple[list[float], ...]) -> None:
    with pytest.raises(InvalidInput, match="one value a prompt"):
        statistics.bootstrap(*samples, statistic=np.mean)
    with pytest.raises(InvalidInput, match="at least one"):
        statistics.percentile([[1.0], []], 50)


def test_mcnemar_is_scipys_binomial_tail() -> None:
    for lost, won in ((0, 3), (2, 9), (7, 1), (4, 4), (20, 6)):
        dense, method = [True] * lost + [False] * won, [False] * lost + [True] * won
        tail = min(1.0, 2 * stats.binom.cdf(min(lost, won), lost + won, 0.5))
        assert statistics.mcnemar(dense, method) == pytest.approx(tail)


def test_interval_of_a_ratio_is_scipys() -> None:
    rng = np.random.default_rng(5)
    above, below = rng.uniform(1, 2, 15), rng.uniform(0.2, 0.5, 15)
    own = stats.bootstrap(
        (above, below), lambda a, b: np.median(a) / np.median(b), paired=True, vectorized=False, n_resamples=4_000,
        method="percentile", rng=np.random.default_rng(1), confidence_level=expanded(15),
    ).confidence_interval  # fmt: skip
    found = statistics.ratio_of_medians(above.tolist(), below.tolist())
    assert (found.low, found.high) == pytest.approx((own.low, own.high), rel=0.05)


def test_interval_of_a_percentile_is_scipys() -> None:
    values = np.random.default_rng(9).exponential(size=60)
    own = stats.bootstrap(
        [values], lambda v, axis=-1: np.percentile(v, 95, axis=axis), method="percentile", n_resamples=4_000,
        rng=np.random.default_rng(2), confidence_level=expanded(60),
    ).confidence_interval  # fmt: skip
    found = statistics.percentile([[value] for value in values.tolist()], 95)
    assert (found.low, found.high) == pytest.approx((own.low, own.high), rel=0.05)


def test_rank_correlation_is_scipys() -> None:
    a, b = np.random.default_rng(4).normal(size=(2, 30))
    ranks = [stats.rankdata(side) for side in (a, b)]
    assert statistics.rank_correlation(a.tolist(), b.tolist()) == pytest.approx(stats.pearsonr(*ranks).statistic)
