"""``eval gate``: its figures by hand, and a run on a tiny model."""

from __future__ import annotations

import pytest

from eval.studies.gate import gate_figures, gate_rows
from tests.eval.tiny_setting import tiny_setting


def test_figures_by_hand() -> None:
    rows = [
        {"tokens": 30, "dense_s": 1.0, "gated_s": 1.05, "reused": 0.25},
        {"tokens": 100, "dense_s": 2.0, "gated_s": 1.0, "reused": 1.0},
        {"tokens": 60, "dense_s": 2.0, "gated_s": 1.5, "reused": 0.75},
    ]
    assert gate_figures(rows) == {"worst_loss": pytest.approx(0.05), "engages_from": 60}
    assert gate_figures(rows[:1])["engages_from"] is None


def test_each_length_is_measured_both_ways() -> None:
    first, second = gate_rows(tiny_setting(), (60, 200), repeats=2)
    assert first["tokens"] < second["tokens"] <= 210
    for row in (first, second):
        assert min(row["dense_s"], *row["gated_all_s"]) > 0 and len(row["gated_all_s"]) == 2
        assert 0 <= row["reused"] <= 1 and row["predicted_reuse_s"] > 0
