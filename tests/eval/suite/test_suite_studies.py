"""Studies beside a preset's results become sections of its document; a file that cannot be shown is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.figures.statistics import ratio_of_medians
from eval.studies.tools_story import FORMS, METHODS
from eval.studies.tools_story import summary as tools_summary
from eval.suite.studies import Found, found_beside
from kvcomm.errors import InvalidInput

ABOUT = {"machine": "abacus", "threads": 2}


def written(folder: Path, name: str, **result: Any) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**ABOUT, "command": f"python -m eval {name}", **result}))
    return path


def one(folder: Path) -> Found:
    (found,) = found_beside(folder)
    return found


def test_a_folder_without_studies_has_none(tmp_path: Path) -> None:
    assert not list(found_beside(tmp_path))


def test_peers_by_hand(tmp_path: Path) -> None:
    share = {"value": 0.5, "low": 0.5, "high": 0.5, "n": 2}
    summed = {
        "version": "7", "ratio": ratio_of_medians([2.0, 2.0], [0.5, 0.5]).as_json(), "dense_s": 2.0, "reused_s": 0.5,
        "again_ratio": ratio_of_medians([2.0, 2.0], [0.25, 0.25]).as_json(), "rows": [],
        **dict.fromkeys(("reused", "again", "first_token", "kept"), share),
    }  # fmt: skip
    written(tmp_path, "peers", peers={"cache": summed}, skipped={"other": "not here"})
    found = one(tmp_path)
    assert "| cache | 2.000 | 0.500 | 4.00× (4.00 to 4.00) | 50% |" in found.table and "8.00×" in found.table
    assert "cache: 7" in found.table and "- other did not run: not here" in found.table
    assert len(found.plots) == 2 and "its own dense run" in found.plots[0]


@pytest.mark.parametrize("timed", [True, False])
def test_changing_tools(tmp_path: Path, timed: bool) -> None:
    rows = [
        {"form": form, "change": "one removed", "case": "q", "method": method, "hit": 0.25, "exact": 10,
         "prompt_tokens": 40, "first_kl": 0.0, "ttft_s": [1.0] * timed}
        for form in FORMS for method in METHODS
    ]  # fmt: skip
    written(tmp_path, "tools-story", table=[tools_summary(rows, form, "one removed") for form in FORMS])
    found = one(tmp_path)
    assert "| as given | one removed | 25.0% | 25.0% |" in found.table
    assert len(found.plots) == 1 + timed and "one removed: kvcomm" in found.plots[0]


def test_the_tail(tmp_path: Path) -> None:
    entry = {"value": 1.5, "low": 1.0, "high": 2.0, "n": 2}
    summed = {**{f"ttft_p{q}": entry for q in (50, 95, 99)}, "calls": 20, "reused": 0.9, "wall_s": 3.0}
    written(tmp_path, "tail", methods={"dense": summed, "kvcomm": summed})
    found = one(tmp_path)
    assert "| kvcomm | 1.500 (1.000 to 2.000) |" in found.table and "kvcomm, p99" in found.plots[0]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", "{}", '{"methods": {"dense": {}}}', '{"methods": 3}'])
def test_what_cannot_be_shown_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tail.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="tail.json cannot be shown .*measure again: python -m eval tail"):
        list(found_beside(tmp_path))
