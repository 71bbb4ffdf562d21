"""The whole of ``eval run`` and ``eval demo`` on the real model, small."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eval import demo, run
from eval.demo_result import read_demo
from kvcomm.errors import InvalidInput


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _numbers(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _numbers(item)]
    return [value]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("run") / "run.json"
    run.run(
        task="humaneval",
        topology="full",
        agents=3,
        methods="rerotate,leading,kvcomm",
        prompts=1,
        fill_prompts=2,
        prompt_tokens=480,
        answer_tokens=6,
        repeats=1,
        seed=1,
        fill_by="prefill",
        execute=False,
        model=None,
        out=out,
    )
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_figures_are_finite_numbers(small_run: dict[str, Any]) -> None:
    leaves = _numbers(small_run)
    assert None not in leaves
    assert all(math.isfinite(leaf) for leaf in leaves if isinstance(leaf, float))


def test_dense_and_exact_are_always_measured_and_equal(small_run: dict[str, Any]) -> None:
    cells = {cell["method"]: cell for cell in small_run["cells"]}
    assert list(cells) == ["dense", "exact", "rerotate", "leading", "kvcomm"]
    for name in ("dense", "exact"):
        assert cells[name]["reuse"] == 0
        assert cells[name]["closeness"]["mean_kl"] < 1e-6
        assert cells[name]["closeness"]["top1"] == 1


def test_token_counts_add_up_to_the_prompt(small_run: dict[str, Any]) -> None:
    for cell in small_run["cells"]:
        for row in cell["rows"]:
            assert sum(row["tokens"].values()) == row["prompt_tokens"]


def test_last_prompt_has_about_the_length_asked_for(small_run: dict[str, Any]) -> None:
    rows = [row for row in small_run["cells"][0]["rows"] if row["agent"] == "solver"]
    assert all(420 <= row["prompt_tokens"] <= 500 for row in rows)


def test_reuse_is_where_it_should_be(small_run: dict[str, Any]) -> None:
    cells = {cell["method"]: cell for cell in small_run["cells"]}
    assert cells["rerotate"]["reuse"] > cells["kvcomm"]["reuse"] > cells["leading"]["reuse"] > 0.5
    first = [row for row in cells["kvcomm"]["rows"] if row["agent"] == "planner"]
    assert all(row["reuse"] == 0 for row in first)


def test_rounding_is_measured(small_run: dict[str, Any]) -> None:
    assert 0 < small_run["yardstick"]["mean_kl"] < 0.05


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"methods": "nonsense"}, "nonsense"), ({"topology": "ring"}, "ring"), ({"repeats": 0}, "0")],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = dict(
        task="humaneval", topology="full", agents=3, methods="kvcomm", prompts=1, fill_prompts=1, prompt_tokens=480,
        answer_tokens=4, repeats=1, seed=0, fill_by="prefill", execute=False, model=None, out=Path("unused.json"),
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=named):
        run.run(**(arguments | changed))


def test_demo_writes_figures_and_page(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    demo.demo(prompts=1, fill_prompts=1, prompt_tokens=620, answer_tokens=4, repeats=1, seed=2, model=None, out=out)
    result = read_demo(out)
    assert [agent.name for agent in result.agents] == ["planner", "analyst", "solver", "reviewer", "editor"]
    assert all(agent.tokens.total == agent.prompt_tokens for agent in result.agents)
    assert result.reused > 0.5
    assert set(result.workflow_s) == {"dense", "reused"}
    assert out.with_suffix(".html").read_text(encoding="utf-8").count("<svg") >= 1
