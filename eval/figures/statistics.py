"""Intervals and tests for few prompts: what is resampled is the prompt, never the rows that belong to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvcomm.errors import InvalidInput

CONFIDENCE = 0.95  # of every interval
_Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
RESAMPLES = 10_000
Values = NDArray[np.float64]
Statistic = Callable[..., Any]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval.

    Attributes:
        n: how many prompts are behind it. With one there is no interval: low and high are the value itself.
    """

    value: float
    low: float
    high: float
    n: int

    def as_json(self) -> dict[str, float]:
        """For a results file."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


def tail(n: int) -> float:
    """The share of resamples to leave out on either side of an interval from ``n`` prompts, at least two.

    Wider than (1 - CONFIDENCE) / 2, as a t interval is wider than a normal one: T. Hesterberg, "What Teachers Should
    Know About the Bootstrap", The American Statistician 69(4), 2015, the expanded percentile interval.
    """
    t = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return float(stats.norm.cdf(-np.sqrt(n / (n - 1)) * t))


def bootstrap(*samples: Sequence[float], statistic: Statistic) -> Estimate:
    """A statistic of paired samples with its expanded percentile interval (scipy.stats.bootstrap, fixed seed).

    Args:
        samples: one value a prompt each, in the same order of prompts; resampled together.
        statistic: of as many arrays, with ``axis``: it is called on many resamples at once.

    Raises:
        InvalidInput: no prompt, samples of different length, or a value, figure or limit that is not a finite number.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    n = len(arrays[0])
    if n == 0 or any(len(array) != n for array in arrays):
        raise InvalidInput(f"samples of {[len(array) for array in arrays]} prompts; give one value a prompt in each")
    _finite(*arrays)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*arrays, axis=-1))
        if n == 1 or all(np.ptp(array) == 0 for array in arrays):
            low, high = value, value
        else:
            low, high = stats.bootstrap(
                arrays, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile",
                confidence_level=1 - 2 * tail(n), rng=np.random.default_rng(0), batch=1_000,
            ).confidence_interval  # fmt: skip
    _finite([value, low, high])
    return Estimate(value, float(low), float(high), n)


def _finite(*arrays: Sequence[float] | Values) -> None:
    wrong = [float(value) for array in arrays for value in array if not np.isfinite(value)]
    if wrong:
        raise InvalidInput(f"{wrong[0]} among the values of a figure or its limits; give finite ones, divisors above 0")


def mean(values: Sequence[float]) -> Estimate:
    """Mean over prompts."""
    return bootstrap(values, statistic=np.mean)


def mean_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean over prompts of ``after`` - ``before``."""
    return mean([b - a for a, b in zip(before, after, strict=True)])


def share(values: Sequence[float]) -> Estimate:
    """Mean over prompts of what is 1 or 0 for each, with Wilson's interval (E. B. Wilson, JASA 22, 1927).

    A bootstrap of prompts that all are 1 has no width, however few they are; this one has. A prompt with several
    calls may have a value between 0 and 1: it varies less than 0 and 1 would, so that the interval is wide enough.

    Raises:
        InvalidInput: no prompt, or a value outside 0 to 1.
    """
    n, found = len(values), _share(values)
    middle = (found + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    reach = _Z * np.sqrt(found * (1 - found) / n + _Z**2 / (4 * n * n)) / (1 + _Z**2 / n)
    return _within(found, float(middle), float(reach), n, 0.0)


def share_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """``mean_difference`` of what is 1 or 0 for each prompt, with an interval that has width where no prompt differs.

    It is Wald's for paired shares with half a prompt more in each of the four outcomes (A. Agresti, Y. Min, "Simple
    improved confidence intervals for comparing matched proportions", Statistics in Medicine 24, 2005).

    Raises:
        InvalidInput: no prompt, or a value outside 0 to 1.
    """
    n, found = len(before), _share(after) - _share(before)
    moved = [b - a for a, b in zip(before, after, strict=True)]
    middle = sum(moved) / (n + 2)
    reach = _Z * np.sqrt(sum(map(abs, moved)) + 1 - sum(moved) ** 2 / (n + 2)) / (n + 2)
    return _within(found, middle, float(reach), n, -1.0)


def _share(values: Sequence[float]) -> float:
    if not len(values) or not all(0 <= value <= 1 for value in values):
        raise InvalidInput(f"{list(values)} are no shares; give at least one prompt, each a value from 0 to 1")
    return float(np.mean(values))


def _within(value: float, middle: float, reach: float, n: int, least: float) -> Estimate:
    """An interval cut to what is possible, from ``least`` to 1; from one prompt none."""
    if n == 1:
        return Estimate(value, value, value, 1)
    return Estimate(value, max(least, min(value, middle - reach)), min(1.0, max(value, middle + reach)), n)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Median of ``above`` over median of ``below``, prompts paired: dense TTFT over a method's is its speed-up.

    Raises:
        InvalidInput: a value of ``below`` is not above 0, or as for ``bootstrap``.
    """
    if not all(value > 0 for value in below):
        raise InvalidInput(f"{min(below)} among the values to divide by; they must be above 0 in every prompt")
    return bootstrap(above, below, statistic=_ratio_of_medians)


def _ratio_of_medians(above: Values, below: Values, axis: int = -1) -> Any:
    return np.median(above, axis=axis) / np.median(below, axis=axis)


def percentile(groups: Sequence[Sequence[float]], q: float) -> Estimate:
    """The q-th percentile over all values; whole groups (a prompt's, a conversation's) are resampled.

    Raises:
        InvalidInput: no group, an empty one, or a value that is not a finite number.
    """
    if not groups or not all(len(group) for group in groups):
        raise InvalidInput(f"groups of {[len(group) for group in groups]} values; each needs at least one")
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    _finite(*arrays)
    value = float(np.percentile(np.concatenate(arrays), q))
    n = len(groups)
    if n == 1:
        return Estimate(value, value, value, 1)
    rng = np.random.default_rng(0)
    drawn = rng.integers(n, size=(RESAMPLES // 10, n))
    found = [np.percentile(np.concatenate([arrays[i] for i in row]), q) for row in drawn]
    low, high = np.percentile(found, [100 * tail(n), 100 - 100 * tail(n)])
    return Estimate(value, float(low), float(high), n)


def mcnemar(dense: Sequence[bool], method: Sequence[bool]) -> float:
    """McNemar's exact two-sided p: are prompts that only dense solves as many as those that only the method solves?

    The exact test is a sign test on the prompts that differ (scipy.stats.binomtest); without any, p is 1.
    """
    pairs = list(zip(dense, method, strict=True))
    lost = sum(a and not b for a, b in pairs)
    won = sum(b and not a for a, b in pairs)
    return 1.0 if lost + won == 0 else float(stats.binomtest(lost, lost + won, 0.5).pvalue)


def rank_correlation(estimates: Sequence[float], truths: Sequence[float]) -> float | None:
    """Spearman's rank correlation, or None for fewer than 3 pairs or where one side never varies.

    Raises:
        InvalidInput: a value is not a finite number.
    """
    _finite(list(estimates), list(truths))
    if len(estimates) < 3 or len(set(estimates)) == 1 or len(set(truths)) == 1:
        return None
    return float(stats.spearmanr(estimates, truths).statistic)


def by_prompt(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, float]:
    """The mean of ``column`` for each prompt: rows of one prompt are not independent of each other."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(float(row[column]))
    return {case: float(np.mean(values)) for case, values in found.items()}
