"""``python -m eval.figures.coverage``: how often intervals of statistics.py hold the truth, by prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from eval.figures.statistics import Estimate, Values, mean, share, share_difference
from eval.files.output import markdown_table

PROMPTS = (3, 4, 6, 12, 20)
Draw = Callable[[np.random.Generator, int], Values]
Figure = Callable[[list[float]], Estimate]


def _of_pairs(values: list[float]) -> Estimate:
    """Dense solves 9 of 10 prompts, the method 9 of 10, each by chance: both outcomes in one value."""
    return share_difference([v // 2 for v in values], [v % 2 for v in values])


CASES: dict[str, tuple[Figure, Draw, float]] = {
    "mean, normal": (mean, lambda rng, n: rng.normal(size=n), 0.0),
    "mean, lognormal": (mean, lambda rng, n: rng.lognormal(size=n), float(np.exp(0.5))),
    "share of 0.5": (share, lambda rng, n: (rng.random(n) < 0.5).astype(float), 0.5),
    "share of 0.9": (share, lambda rng, n: (rng.random(n) < 0.9).astype(float), 0.9),
    "difference of two shares of 0.9": (
        _of_pairs, lambda rng, n: 2.0 * (rng.random(n) < 0.9) + (rng.random(n) < 0.9), 0.0
    ),
}  # fmt: skip
"""A figure, how a prompt's values are drawn, and the truth; KL and times are skewed much as a lognormal is."""


def covered(case: str, n: int, trials: int, seed: int = 0) -> float:
    """The share of ``trials`` experiments with ``n`` prompts whose interval holds the truth."""
    figure, draw, truth = CASES[case]
    rng = np.random.default_rng(seed)
    found = (figure(draw(rng, n).tolist()) for _ in range(trials))
    return sum(one.low <= truth <= one.high for one in found) / trials


def table(trials: int) -> str:
    """Coverage as a Markdown table."""
    rows = [[case, *(f"{covered(case, n, trials):.1%}" for n in PROMPTS)] for case in CASES]
    return markdown_table(("95 % interval of a …, from n prompts:", *map(str, PROMPTS)), rows)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
