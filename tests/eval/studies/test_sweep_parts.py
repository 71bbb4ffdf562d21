"""Parts of a sweep: shared by runs over other tasks, never by runs of other settings; points by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.methods.registry import METHODS
from eval.running import setting as setting_module
from eval.running.setting import Setting
from eval.studies import sweep as sweep_module
from eval.studies.sweep import points, sweep
from kvcomm.errors import InvalidInput, KVCommError
from tests.eval.tiny_setting import tiny_setting

TRIAL = {"agents": 2, "prompts": 1, "seed": 0}
CHOSEN = {name: METHODS[name] for name in ("dense", "exact", "kvcomm")}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return tiny_setting()


def row(method: str, case: str = "p", **changed: Any) -> dict[str, Any]:
    plain = {
        "case": case, "agent": "b", "method": method, "reuse": 0.5, "ttft_s": [2.0], "answer_tokens": 4,
        "greedy_run": 4, "greedy_run_share": 1.0, "tie": False, "mean_kl": 0.0, "first_kl": 0.0, "top1": 1.0,
        "first_token": 1.0, "prompt_tokens": 9,
    }  # fmt: skip
    return plain | changed


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are measured, in order; ``maths`` fails."""
    names: list[str] = []

    def part(setting: Setting, task: str, topology: str, methods: Any, trial: Any) -> dict[str, Any]:
        names.append(f"{task}, {topology}")
        if task == "maths":
            raise InvalidInput("no such text")
        return {"rows": [row(name) for name in ("dense", "exact", "kvcomm", "yardstick")], "facts": {}}

    monkeypatch.setattr(sweep_module, "_part", part)
    return names


def test_a_run_over_more_takes_the_parts_of_one_over_less(
    setting: Setting, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pareto.json"
    sweep(setting, ["documents"], ["chain"], CHOSEN, out, **TRIAL)
    found = sweep(setting, ["humaneval", "documents"], ["full", "chain"], CHOSEN, out, **TRIAL)
    assert measured == ["documents, chain", "humaneval, full", "humaneval, chain", "documents, full"]
    assert found["jobs"] == 1 and len(found["rows"]) == 16
    measured.clear()
    sweep(setting, ["documents"], ["chain"], CHOSEN, out, **TRIAL)
    assert measured == []
    for other in (TRIAL | {"seed": 1}, TRIAL | {"prompts": 2}):
        sweep(setting, ["documents"], ["chain"], CHOSEN, out, **other)
    sweep(setting, ["documents"], ["chain"], {"dense": METHODS["dense"]}, out, **TRIAL)
    monkeypatch.setattr(setting_module, "code_digest", lambda: "of other code")
    sweep(setting, ["documents"], ["chain"], CHOSEN, out, **TRIAL)
    assert measured == ["documents, chain"] * 4


def test_a_part_that_fails_is_named_and_the_others_are_kept(
    setting: Setting, tmp_path: Path, measured: list[str]
) -> None:
    out = tmp_path / "pareto.json"
    with pytest.raises(KVCommError, match=r"maths, full: InvalidInput: no such text; the other 1 parts are kept"):
        sweep(setting, ["maths", "documents"], ["full"], CHOSEN, out, **TRIAL)
    sweep(setting, ["documents"], ["full"], CHOSEN, out, **TRIAL)
    assert measured == ["maths, full", "documents, full"]


def test_points_by_hand() -> None:
    rows = [
        row("dense", ttft_s=[4.0, 6.0]), row("dense", "q", ttft_s=[5.0]),
        row("kvcomm", ttft_s=[1.0, 3.0], mean_kl=0.1, reuse=0.5, greedy_run=2),
        row("kvcomm", "q", ttft_s=[2.0], mean_kl=0.3, reuse=0.9, tie=True),
    ]  # fmt: skip
    (found,) = points(rows, CHOSEN)
    assert (found["method"], found["n"], found["n_ttft"]) == ("kvcomm", 2, 3)
    assert (found["dense_ttft_s"], found["ttft_s"]) == (5.0, 2.0)
    assert found["reuse"] == pytest.approx(0.7) and found["recompute"] == pytest.approx(0.3)
    assert found["mean_kl"] == pytest.approx(0.2)
    assert (found["identical"], found["ties"]) == (0.5, 1)
