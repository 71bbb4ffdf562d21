"""``eval run --task path.jsonl``: a user's own questions from the file to the figures, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import run
from eval.setting import Setting
from kvcomm.errors import InvalidInput
from tests.eval.tiny_setting import tiny_setting

_TREES = ("larch", "alder", "rowan", "aspen", "cedar", "hazel", "maple", "elder")


def test_a_users_own_task_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: tiny_setting())
    task, out = tmp_path / "trees.jsonl", tmp_path / "run.json"
    with task.open("w") as lines:
        for number, tree in enumerate(_TREES):
            segment = f"Plot {number} of the garden was planted with {tree} trees by the {tree} society in spring. "
            question = f"Which trees stand in plot {number}, and who planted the {tree}?"
            record = {"question": question, "segments": [segment * 4], "answer": tree, "answered_in": 0}
            lines.write(json.dumps(record) + "\n")
    run.run(
        preset=None, task=str(task), topology="map-reduce", agents=3, rounds=1, methods="kvcomm", prompts=1,
        fill_prompts=1, prompt_tokens=520, answer_tokens=4, repeats=1, seed=0, fill_by="prefill", execute=False,
        model=None, out=out,
    )  # fmt: skip
    result = json.loads(out.read_text())
    cells = {cell["method"]: cell for cell in result["cells"]}
    assert set(cells) == {"dense", "exact", "kvcomm"}
    assert cells["kvcomm"]["topology"] == "map-reduce" and cells["kvcomm"]["reuse"] > 0.3
    assert cells["dense"]["score"] == {"mean": 0.0, "n": 1}
    assert [row["agent"] for row in cells["dense"]["rows"]] == ["planner", "analyst", "merger"]


def test_a_task_and_a_preset_are_too_much() -> None:
    with pytest.raises(InvalidInput, match="quick were both given"):
        run.run(preset="quick", task="needle")
