"""``eval run --task path.jsonl``: a user's own questions from the file to the figures, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import run
from eval.running.setting import Setting
from eval.suite.files import read_suite
from kvcomm.errors import InvalidInput
from tests.eval.tiny_setting import tiny_setting

_TREES = ("larch", "alder", "rowan", "aspen", "cedar", "hazel", "maple", "elder")


def test_a_users_own_task_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: tiny_setting())
    task, out = tmp_path / "trees.jsonl", tmp_path / "run.json"
    with task.open("w") as lines:
        for number, tree in enumerate(_TREES):
            segment = f"Plot {number} of the garden was planted with {tree} trees by the {tree} society in spring. "
            question = f"Which trees stand in plot {number}, and who planted the {tree}?"
            record = {"question": question, "segments": [segment * 4], "answer": tree, "answered_in": 0}
            lines.write(json.dumps(record) + "\n")
    run.app(
        ["--task", str(task), "--topology", "map-reduce", "--agents", "3", "--methods", "kvcomm", "--prompts", "1",
         "--fill-prompts", "1", "--prompt-tokens", "520", "--answer-tokens", "4", "--repeats", "1",
         "--fill-by", "prefill", "--out", str(out)],
        standalone_mode=False,
    )  # fmt: skip
    (cell,) = read_suite(out)["cells"]
    assert cell["name"] == "trees.jsonl, map-reduce" and list(cell["methods"]) == ["dense", "exact", "kvcomm"]
    assert cell["methods"]["kvcomm"]["reuse"]["value"] > 0.3
    assert [row["agent"] for row in cell["rows"] if row["method"] == "dense"] == ["planner", "analyst", "merger"]
    for found in cell["methods"].values():  # each method's own answer is scored
        assert found["score"]["value"] == 0 and found["score"]["n"] == 1
    said = capsys.readouterr()
    assert "score" in said.err and str(out.with_suffix(".html")) in said.out


@pytest.mark.parametrize("name", ["own.jsonl", "run.md", "run.html", "linked.json", "hard.json", "page.json"])
def test_nothing_is_replaced_by_its_own_results(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: pytest.fail("loaded"))
    task = tmp_path / "own.jsonl"
    task.write_text('{"question": "Which tree?", "segments": ["An alder."]}\n')
    (tmp_path / "linked.json").symlink_to(task)
    (tmp_path / "hard.json").hardlink_to(task)
    (tmp_path / "page.html").symlink_to(task)
    with pytest.raises(InvalidInput, match="is the same file for|would be replaced"):
        run.app(["--task", str(task), "--out", str(tmp_path / name)], standalone_mode=False)
    assert "alder" in task.read_text()


@pytest.mark.parametrize("out", ["", ".", "loop.json"])
def test_a_path_that_cannot_be_is_said(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: pytest.fail("loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "own.jsonl").write_text('{"question": "Which tree?", "segments": ["An alder."]}\n')
    for what in (["--task", "own.jsonl"], ["--preset", "quick"]):
        with pytest.raises(InvalidInput, match="is no file's name|cannot be written"):
            run.app([*what, "--out", out], standalone_mode=False)
