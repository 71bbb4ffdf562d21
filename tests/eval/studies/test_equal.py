"""Methods compared at equal recompute, by hand."""

from __future__ import annotations

import math

import pytest

from eval.studies.equal import read_off, table


def point(method: str, recompute: float, kl: float) -> dict[str, object]:
    return {"method": method, "recompute": recompute, "mean_kl": kl, "first_kl": 2 * kl}


def test_between_points_the_line_is_straight_in_the_logarithm() -> None:
    line = [point("a@1", 0.04, 0.1), point("a@2", 0.08, 0.001)]
    assert read_off(line, 0.06, "mean_kl") == pytest.approx(0.01)
    assert read_off(line, 0.05, "first_kl") == pytest.approx(2 * math.exp(math.log(0.1) - math.log(100) / 4))


def test_nothing_is_extrapolated_to_the_left_and_spending_less_is_allowed() -> None:
    line = [point("a@1", 0.10, 0.1), point("a@2", 0.12, 0.3)]
    assert read_off(line, 0.05, "mean_kl") is None
    assert read_off(line, 0.11, "mean_kl") == pytest.approx(0.1)
    assert read_off(line, 0.30, "mean_kl") == pytest.approx(0.1)
    assert read_off([], 0.30, "mean_kl") is None


def test_the_table_names_the_best_of_each_side() -> None:
    points = [
        point("leading@0.05", 0.05, 0.08),
        point("leading-captured@0.05", 0.05, 0.04),
        point("kvcomm-predicted@0.05", 0.05, 0.01),
        point("kvcomm-product@0.1", 0.08, 0.001),
        point("oracle@0.05", 0.05, 0.0001),
        point("ablation-predicted-no-offsets@0.05", 0.05, 0.02),
    ]
    rows = {row["recompute"]: row for row in table(points)}
    assert rows[0.05]["mean_kl"] == {
        "published": ("leading-captured", 0.04),
        "kvcomm": ("kvcomm-predicted", 0.01),
        "ratio": pytest.approx(0.25),
        "offsets": {"kvcomm-predicted": pytest.approx(0.5), "kvcomm-product": None},
    }
    assert rows[0.10]["mean_kl"]["kvcomm"] == ("kvcomm-product", 0.001)
    assert table([])[0]["mean_kl"] == {
        "published": None,
        "kvcomm": None,
        "ratio": None,
        "offsets": {"kvcomm-predicted": None, "kvcomm-product": None},
    }
