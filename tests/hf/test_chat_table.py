"""docs/chat.md has the counts that the real model gives, and they are what the text beside them says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chat import DOC, TURNS, replaced, tables


def rows(made: str) -> list[list[str]]:
    """A table's cells, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines()[2:]]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return tables()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tables_are_current(found: dict[str, str]) -> None:
    text = DOC.read_text(encoding="utf-8")
    assert replaced(text, found) == text, "run python -m benchmarks.chat"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_turn_costs_what_came_since_the_last_call(found: dict[str, str]) -> None:
    counts = [[int(cell) for cell in row] for row in rows(found["turns"])]
    assert counts[-1][0] == TURNS
    assert all(computed == since and approximate == 0 for _, _, since, _, approximate, computed in counts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["tools-canonical", "tools-as-given"])
def test_a_changed_catalogue_costs_its_segment_and_what_is_recomputed(found: dict[str, str], form: str) -> None:
    by_change: dict[str, Any] = {change: [int(n) for n in cells] for change, *cells in rows(found[form])}
    new = {"one appended", "one inserted first"} | ({"keys of one shuffled"} if form == "tools-as-given" else set())
    for change, (prompt, unseen, exact, approximate, recomputed, _) in by_change.items():
        assert prompt == unseen + exact + approximate + recomputed
        assert (unseen > 0) == (change in new)
        assert recomputed <= 0.15 * prompt, "8 tokens of each segment behind the change"
    same = ["nothing changed"]
    same += ["two swapped", "keys of one shuffled"] if form == "tools-canonical" else []
    assert all(by_change[change][3:5] == [0, 1] for change in same)
