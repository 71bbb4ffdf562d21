"""``eval pareto``, ``ablations`` and ``learning`` on the real model, small: everything runs, the files are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.studies import ablations, learning, pareto

SMALL = {"agents": 3, "prompts": 1, "prompt_tokens": 400, "answer_tokens": 4, "seed": 1, "model": None}


def _names(points: list[dict[str, Any]]) -> set[str]:
    return {point["method"].split("@")[0] for point in points}


def test_pareto_measures_published_and_own_methods_on_the_same_prompts(tmp_path: Path) -> None:
    out = tmp_path / "pareto.json"
    only = "rerotate,kvcomm-paper,kvcomm-fast,oracle@0.05,leading@0.05,kvcomm-product@0.1,attended-captured@0.1"
    pareto.pareto(tasks="humaneval", topologies="chain", fill_prompts=1, only=only, out=out, **SMALL)  # type: ignore[arg-type]
    result = json.loads(out.read_text())
    points = result["points"]
    assert {
        "rerotate",
        "kvcomm-fast",
        "kvcomm-product",
        "kvcomm-paper",
        "oracle",
        "leading",
        "attended-captured",
    } <= _names(points)
    assert {point["n"] for point in points} == {2}  # the agents that hear another
    assert set(result["by_text"]) == {"humaneval"}
    wanted = {"method", "recompute", "reuse", "mean_kl", "top1", "first_token", "ttft_s", "dense_ttft_s", "n"}
    for point in points:
        assert wanted <= set(point)
        assert point["ttft_s"] > 0 and 0 <= point["recompute"] <= 1
    at = {point["method"]: point["recompute"] for point in points}
    assert at["rerotate"] < 0.02 < at["leading@0.05"] < 0.2
    assert out.with_suffix(".svg").read_text().startswith("<?xml")


def test_ablations_learn_from_the_same_calls(tmp_path: Path) -> None:
    out = tmp_path / "ablations.json"
    ablations.run(tasks="humaneval", topologies="chain", fill_prompts=2, out=out, **SMALL)  # type: ignore[arg-type]
    points = {point["method"]: point for point in json.loads(out.read_text())["points"]}
    assert set(ablations.ablations()) - {"dense", "exact"} == set(points)
    plain = points["ablation-no-offsets"]["mean_kl"]
    learned = [points[f"ablation-{name}"]["mean_kl"] for name in ("mean", "softmax", "ungated", "ridge-0.3")]
    assert all(kl != plain for kl in learned)
    assert len(set(learned)) == len(learned)


def test_learning_measures_the_same_prompts_after_each_number_of_calls(tmp_path: Path) -> None:
    out = tmp_path / "learning.json"
    learning.learning(task="humaneval", topology="chain", calls=2, warm_calls=1, out=out, **SMALL)  # type: ignore[arg-type]
    result = json.loads(out.read_text())
    assert [point["calls"] for point in result["curve"]] == ["warmed", 0, 1, 2]
    untaught = result["curve"][1]["methods"]
    assert untaught["kvcomm-fast"]["mean_kl"] == pytest.approx(untaught["ablation-no-offsets"]["mean_kl"], abs=1e-6)
    plain = [point["methods"]["ablation-no-offsets"]["mean_kl"] for point in result["curve"][2:]]
    assert plain == pytest.approx([plain[0]] * 2, rel=1e-3)  # at 0 the fixed texts are not held yet either


def test_half_of_the_gain_by_hand() -> None:
    def point(calls: int, kl: float) -> dict[str, Any]:
        return {"calls": calls, "methods": {"kvcomm": {"mean_kl": kl}, learning.PAIRS["kvcomm"]: {"mean_kl": 0.10}}}

    curve = [point(0, 0.10), point(1, 0.08), point(2, 0.06), point(4, 0.05), point(8, 0.02)]
    assert learning.half_of_the_gain(curve, "kvcomm") == 2
    assert learning.half_of_the_gain([point(0, 0.1), point(1, 0.2)], "kvcomm") is None
