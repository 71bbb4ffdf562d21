"""Finished parts of a run that was cut off."""

from __future__ import annotations

from pathlib import Path

from eval.finished import Finished


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path, about = tmp_path / "parts.jsonl", {"seed": 1, "model": "m"}
    first = Finished(path, about)
    assert first.get("a") is None
    first.add("a", [{"kl": 0.5}])
    with path.open("a") as file:
        file.write('{"about": "x", "na')  # cut off
    again = Finished(path, about)
    assert again.get("a") == [{"kl": 0.5}]
    assert again.get("b") is None


def test_parts_of_another_setting_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    Finished(path, {"seed": 1}).add("a", 1)
    assert Finished(path, {"seed": 2}).get("a") is None
    done = Finished(path, {"seed": 1})
    assert done.get("a") == 1
    done.clear()
    assert not path.exists()
    done.clear()
