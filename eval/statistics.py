"""Intervals and tests for few prompts: what is resampled is the prompt, never the rows that belong to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvcomm.errors import InvalidInput

CONFIDENCE = 0.95
RESAMPLES = 10_000
Values = NDArray[np.float64]
Statistic = Callable[..., Any]


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval.

    Attributes:
        n: how many prompts were resampled. With one there is no interval: low and high are the value itself.
    """

    value: float
    low: float
    high: float
    n: int

    def as_json(self) -> dict[str, float]:
        """For a results file."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


def bootstrap(*samples: Sequence[float], statistic: Statistic, confidence: float = CONFIDENCE) -> Estimate:
    """A statistic of paired samples with its percentile interval (scipy.stats.bootstrap, fixed seed).

    Args:
        samples: one value a prompt each, in the same order of prompts; resampled together.
        statistic: of as many arrays, with ``axis``: it is called on many resamples at once.

    Raises:
        InvalidInput: no prompt, or samples of different length.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    n = len(arrays[0])
    if n == 0 or any(len(array) != n for array in arrays):
        raise InvalidInput(f"samples of {[len(array) for array in arrays]} prompts; give one value a prompt in each")
    value = float(statistic(*arrays, axis=-1))
    if n == 1:
        return Estimate(value, value, value, 1)
    if all(np.ptp(array) == 0 for array in arrays):
        return Estimate(value, value, value, n)
    found = stats.bootstrap(
        arrays, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES, confidence_level=confidence,
        method="percentile", rng=np.random.default_rng(0), batch=1_000,
    )  # fmt: skip
    low, high = found.confidence_interval
    return Estimate(value, float(low), float(high), n)


def mean(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean over prompts."""
    return bootstrap(values, statistic=np.mean, confidence=confidence)


def mean_difference(before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean over prompts of ``after`` - ``before``."""
    return mean([b - a for a, b in zip(before, after, strict=True)], confidence)


def ratio_of_medians(above: Sequence[float], below: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Median of ``above`` over median of ``below``, prompts paired: dense TTFT over a method's is its speed-up."""
    return bootstrap(above, below, statistic=_ratio_of_medians, confidence=confidence)


def _ratio_of_medians(above: Values, below: Values, axis: int = -1) -> Any:
    return np.median(above, axis=axis) / np.median(below, axis=axis)


def percentile(groups: Sequence[Sequence[float]], q: float, confidence: float = CONFIDENCE) -> Estimate:
    """The q-th percentile over all values; whole groups (a prompt's, a conversation's) are resampled.

    Raises:
        InvalidInput: no group, or an empty one.
    """
    if not groups or not all(len(group) for group in groups):
        raise InvalidInput(f"groups of {[len(group) for group in groups]} values; each needs at least one")
    value = float(np.percentile(np.concatenate([np.asarray(group) for group in groups]), q))
    n = len(groups)
    if n == 1:
        return Estimate(value, value, value, 1)
    rng = np.random.default_rng(0)
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    drawn = rng.integers(n, size=(RESAMPLES // 10, n))
    found = [np.percentile(np.concatenate([arrays[i] for i in row]), q) for row in drawn]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(found, [tail, 100 - tail])
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
    """Spearman's rank correlation, or None for fewer than 3 pairs or where one side never varies."""
    if len(estimates) < 3 or len(set(estimates)) == 1 or len(set(truths)) == 1:
        return None
    return float(stats.spearmanr(estimates, truths).statistic)


def by_prompt(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, float]:
    """The mean of ``column`` for each prompt: rows of one prompt are not independent of each other."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(float(row[column]))
    return {case: float(np.mean(values)) for case, values in found.items()}
