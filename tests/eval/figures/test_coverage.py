"""How often intervals hold the truth: the table of docs/evaluation.md, measured again with fewer experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.figures.coverage import CASES, PROMPTS, covered

TRIALS = 500
DOC = Path(__file__).parents[3] / "docs" / "evaluation.md"


def documented() -> dict[tuple[str, int], float]:
    rows = [line.strip("| ").split(" | ") for line in DOC.read_text(encoding="utf-8").splitlines()]
    shown = {row[0]: row[1:] for row in rows if row[0] in CASES}
    return {
        (case, n): float(cell.rstrip("%")) / 100 for case in CASES for n, cell in zip(PROMPTS, shown[case], strict=True)
    }


@pytest.mark.parametrize("n", PROMPTS)
@pytest.mark.parametrize("case", CASES)
def test_coverage_is_what_the_document_says(case: str, n: int) -> None:
    share = documented()[case, n]
    noise = 4 * (share * (1 - share) / TRIALS) ** 0.5 + 1 / TRIALS
    assert covered(case, n, TRIALS, seed=1) == pytest.approx(share, abs=noise)


def test_means_of_normal_values_are_covered_as_promised_from_twelve_prompts_on() -> None:
    assert covered("mean, normal", 12, 1_000) > 0.93
