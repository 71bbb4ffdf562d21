"""The sign-flip test by hand, against scipy's permutation test, and how often it is wrong where nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from eval.figures.sign_flip import ENUMERATED, needed, sign_flip


def test_by_hand() -> None:
    # of 8 patterns over 1, 2, 4 only +++ and --- reach 7; 1 + 2 - 4 = -1 is reached by all
    assert sign_flip([1.0, 2.0, 4.0]) == 2 / 8
    assert sign_flip([1.0, 2.0, -4.0]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.0, 0.3, 0.0, 0.3, 0.3]) == 2 / 8  # what did not move has no sign
    assert sign_flip([0.1, 0.2, 0.3, -0.3]) == pytest.approx(1 - 4 / 16)  # ties: 0.3 is not under 0.1 + 0.2


@pytest.mark.parametrize("n", [3, 8, 12])
def test_is_scipys_permutation_test(n: int) -> None:
    values = np.random.default_rng(n).normal(0.3, size=n)
    own = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True)
    assert sign_flip(values.tolist()) == pytest.approx(own.pvalue)


def test_drawn_patterns_agree_with_all_patterns() -> None:
    values = np.random.default_rng(1).normal(0.5, size=ENUMERATED).tolist()
    negligible = [1e-13] * 10  # so that patterns are drawn
    assert sign_flip([*values, *negligible]) == pytest.approx(sign_flip(values), rel=0.1)
    assert sign_flip([1.0] * 400) < 2e-5


def test_the_fewest_prompts() -> None:
    for level in (0.05, 0.05 / 8, 0.05 / 115):
        n = needed(level)
        assert sign_flip([1.0] * n) <= level < sign_flip([1.0] * (n - 1))


def test_where_nothing_changed_p_is_as_small_as_it_says() -> None:
    rng = np.random.default_rng(3)
    before, after = rng.lognormal(size=(2, 2_000, 9))
    found = np.array([sign_flip(row) for row in (after - before).tolist()])
    for level in (0.01, 0.05, 0.2):
        assert (found <= level).mean() == pytest.approx(level, abs=4 * (level / 2_000) ** 0.5)
