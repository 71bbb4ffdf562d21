"""The whole of ``eval run`` and ``eval demo`` on the real model, small."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval import run
from eval.demo import command
from eval.demo.result import read_demo
from eval.running.setting import Setting
from eval.suite.files import read_suite
from eval.suite.presets import preset
from kvcomm.errors import InvalidInput


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _numbers(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _numbers(item)]
    return [value]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run.json"
    given("--agents", "3", "--prompts", "1", "--fill-prompts", "2", "--prompt-tokens", "480", "--answer-tokens", "6",
          "--repeats", "1", "--seed", "1", "--fill-by", "prefill", "--out", str(out))  # fmt: skip
    return out


def given(*arguments: str) -> None:
    """``eval run`` on HumanEval with ``arguments``."""
    run.app(["--task", "humaneval", *arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def cell(small_run: Path) -> dict[str, Any]:
    (found,) = read_suite(small_run)["cells"]
    return dict(found)


def rows(cell: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [row for row in cell["rows"] if row["method"] == method]


def test_figures_are_finite_numbers(small_run: Path) -> None:
    leaves = _numbers(json.loads(small_run.read_text()))
    assert None not in leaves
    assert all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))


def test_dense_and_exact_are_always_measured_and_equal(cell: dict[str, Any]) -> None:
    assert list(cell["methods"]) == ["dense", "exact", "rerotate", "leading", "kvcomm"]
    for name in ("dense", "exact"):
        found = cell["methods"][name]
        assert found["reuse"]["value"] == 0 and found["top1"]["value"] == 1
        assert found["mean_kl"]["value"] < 1e-6


def test_token_counts_add_up_to_the_prompt(cell: dict[str, Any]) -> None:
    assert all(sum(row["tokens"].values()) == row["prompt_tokens"] for row in cell["rows"])


def test_last_prompt_has_about_the_length_asked_for(cell: dict[str, Any]) -> None:
    last = [row for row in rows(cell, "dense") if row["agent"] == "solver"]
    assert last and all(420 <= row["prompt_tokens"] <= 500 for row in last)


def test_reuse_is_where_it_should_be(cell: dict[str, Any]) -> None:
    reuse = {name: found["reuse"]["value"] for name, found in cell["methods"].items()}
    assert reuse["rerotate"] > reuse["kvcomm"] > reuse["leading"] > 0.5
    assert all(row["reuse"] == 0 for row in rows(cell, "kvcomm") if row["agent"] == "planner")
    assert cell["methods"]["rerotate"]["isolate"]["value"] > 0 and "isolate" not in cell["methods"]["kvcomm"]


def test_rounding_is_measured(cell: dict[str, Any]) -> None:
    assert 0 < cell["yardstick"]["mean_kl"] < 0.05


def test_one_task_has_a_page_and_a_summary_too(small_run: Path) -> None:
    assert "humaneval, full" in small_run.with_suffix(".html").read_text()
    assert "| kvcomm |" in small_run.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("changed", "named"),
    [(("--methods", "nonsense"), "nonsense"), (("--topology", "ring"), "ring"), (("--repeats", "0"), "0"),
     (("--preset", "quick"), "both given"), (("--jobs", "2"), "one part")],
)  # fmt: skip
def test_wrong_arguments_are_named_before_a_model_is_loaded(
    changed: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: pytest.fail("loaded"))
    with pytest.raises(InvalidInput, match=named):
        given(*changed)


def test_what_a_preset_would_ignore_is_refused_and_its_seed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(run, "measure_preset", lambda *arguments: taken.append(arguments))
    with pytest.raises(InvalidInput, match="--prompts, --repeats: a preset has its own"):
        run.app(["--preset", "quick", "--repeats", "3", "--prompts", "9"], standalone_mode=False)
    run.app(["--seed", "7"], standalone_mode=False)
    assert taken == [("quick", None, None, False, 1, 7)]
    assert {cell.trial.seed for cell in preset("standard", 7)} == {7}


def test_demo_writes_figures_and_page(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    command.demo(prompts=1, fill_prompts=1, prompt_tokens=620, answer_tokens=4, repeats=1, seed=2, model=None, out=out)
    result = read_demo(out)
    assert [agent.name for agent in result.agents] == ["planner", "analyst", "solver", "reviewer", "editor"]
    assert all(agent.tokens.total == agent.prompt_tokens for agent in result.agents)
    assert result.reused > 0.5
    assert set(result.workflow_s) == {"dense", "reused"}
    assert out.with_suffix(".html").read_text(encoding="utf-8").count("<svg") >= 1
