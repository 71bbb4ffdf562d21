"""What the rows of ``eval trust`` come to, on a case worked out by hand."""

from __future__ import annotations

import pytest

from eval.studies.trust_figures import figures


def row(kind: str, method: str, kl: float, predicted: float, bound: float, added: int = 0) -> dict[str, object]:
    return {"kind": kind, "case": "", "method": method, "kl": kl, "reuse": 0.5, "predicted": predicted,
            "bound": bound, "added": added}  # fmt: skip


def test_figures_by_hand() -> None:
    rows = [
        row("prose", "balanced", 0.01, 0.01, 0.02, added=3),
        row("prose", "balanced", 0.09, 0.02, 0.04),
        row("prose", "watched fast", 0.3, 0.3, 0.5),
        row("prose", "watched deep", 0.1, 0.2, 0.5),
        row("code", "watched fast", 0.2, 0.1, 0.5),
        row("code", "watched deep", 0.4, 0.05, 0.5),
    ]
    hard = [row("key", "balanced", 0.3, 0.01, 0.02), row("key", "balanced", 0.3, 0.01, 0.07)]
    found = figures(rows, hard, 0.05)
    acted = found["prompts, balanced"]
    assert acted["n"] == 2 and acted["above"] == 0.5 and acted["above_own_bound"] == 0.5
    assert acted["more_computed"] == 0.5 and acted["mean_kl"] == pytest.approx(0.05)
    assert found["prompts, watched"]["n"] == 4
    assert found["prompts, watched"]["rank_correlation"] == pytest.approx(-0.4)  # ranks 4 3 2 1 against 3 1 2 4
    assert found["prompts, watched fast"]["rank_correlation"] is None  # two points order nothing
    assert found["prompts, watched deep"]["by_kind"]["code"]["n"] == 1
    assert found["unnoticed"] == 1  # the other one's own bound was above what was allowed
