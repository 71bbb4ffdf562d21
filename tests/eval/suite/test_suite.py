"""Presets from the first cell to the page, on a tiny model; figures against cases worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.measure import Timed
from eval.methods.registry import METHODS
from eval.running.setting import Setting
from eval.suite import run as suite_run
from eval.suite.compare import compare, compare_suites
from eval.suite.files import read_suite
from eval.suite.metrics import figures, pooled
from eval.suite.presets import PRESETS, Cell, preset
from eval.suite.report import report, write_report
from eval.suite.run import run_cell, run_suite
from eval.tasks import TASKS
from eval.topologies import TOPOLOGIES
from eval.trial import Trial
from kvcomm.errors import InvalidInput, KVCommError
from tests.eval.tiny_setting import tiny_setting

ABOUT = {"preset": "quick", "command": "python -m eval run --preset quick", "seed": 0}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return tiny_setting()


@pytest.fixture(scope="module")
def quick(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("suite") / "quick.json"
    cells = [replace(cell, trial=replace(cell.trial, prompts=2, fill_prompts=1)) for cell in preset("quick")]
    assert run_suite(setting, cells, out, ABOUT) == []
    return out


def small(task: str = "needle", topology: str = "full", prompts: int = 1) -> Cell:
    trial = Trial(topology, 2, prompts, 1, 420, 4, 1, 0, "prefill", own_answers=True)
    return Cell(task, trial, ("dense", "exact", "kvcomm"))


def test_quick_runs_from_end_to_end(quick: Path) -> None:
    result = read_suite(quick)
    assert [cell["name"] for cell in result["cells"]] == ["tools, full", "needle, independent", "needle, debate"]
    assert not quick.with_suffix(".parts.jsonl").exists()
    for cell in result["cells"]:
        for name, found in cell["methods"].items():
            for figure in (entry for entry in found.values() if isinstance(entry, dict) and "low" in entry):
                assert math.isfinite(figure["value"]) and figure["n"] == 2
                assert figure["low"] <= figure["value"] <= figure["high"] or "ttft" in str(found), (name, figure)
        dense, exact = cell["methods"]["dense"], cell["methods"]["exact"]
        assert dense["speedup"]["value"] == 1 and dense["flops_saved"]["value"] == 0
        assert dense["mean_kl"]["value"] < 1e-6 and exact["top1"]["value"] == 1
        assert cell["methods"]["kvcomm"]["flops_saved"]["value"] > exact["flops_saved"]["value"]
    assert result["cells"][1]["methods"]["kvcomm"]["score"]["n"] == 2
    assert result["cells"][2]["methods"]["exact"]["judge"]["value"] == 1
    assert result["pooled"]["kvcomm"]["mean_kl"]["n"] == 2


def test_every_method_is_compared_as_it_is_timed(setting: Setting) -> None:
    trial = Trial("full", 2, 1, 2, 420, 4, 1, 0, "prefill")
    result = run_cell(setting, Cell("needle", trial, tuple(METHODS)))
    last = [row for row in result["rows"] if row["ttft_s"]]
    assert {row["method"] for row in last} == set(METHODS)
    row = next(row for row in last if row["method"] == "kvcomm")
    timed = Timed([0.1], [row["tokens"]])
    timed.check(row)
    with pytest.raises(KVCommError, match=r"kvcomm.*timed with .* compared with"):
        timed.check({**row, "tokens": {**row["tokens"], "approximate": 0}})


def test_report_says_it_all_without_a_request(quick: Path) -> None:
    page, summary = write_report(quick)
    html, text = page.read_text(), summary.read_text()
    assert "http" not in html.replace("http-equiv", "")
    assert html.count("<script>") == 1 and "script-src 'sha256-" in html
    assert html.count("<svg") >= 4 and html.count("<button>") > 20
    for said in ("<span>--preset</span> <span>quick</span>", "torch", "tiny", "needle, debate", "n 2"):
        assert said in html, said
    assert "| kvcomm |" in text and "(n 2)" not in text and "; n 2)" in text


def test_figures_are_taken_from_the_rows_again(quick: Path, tmp_path: Path) -> None:
    true, copy = read_suite(quick), tmp_path / "copy.json"
    copy.write_text(quick.read_text().replace('"value": 1.0', '"value": 3.0'))
    assert read_suite(copy) != true
    report(copy, again=True)
    assert read_suite(copy) == true and "3.0×" not in copy.with_suffix(".html").read_text()


def test_rows_that_make_no_figures_are_named(quick: Path, tmp_path: Path) -> None:
    result, copy = read_suite(quick), tmp_path / "copy.json"
    del result["cells"][0]["rows"][-1]["held_bytes"]
    copy.write_text(json.dumps(result))
    with pytest.raises(InvalidInput, match="figures of tools, full cannot be made of its rows .KeyError: 'held_bytes'"):
        report(copy, again=True)


def test_a_run_against_itself_is_the_same_in_everything(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(quick, quick)
    assert "worse |" not in capsys.readouterr().out
    found = compare_suites(read_suite(quick), read_suite(quick))
    assert {change.verdict for change in found.changes} == {"same"}


def test_a_cell_that_fails_is_reported_and_the_rest_goes_on(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.json"
    cells = (small(), small(topology="chain", prompts=10_000), small("tools"))
    failures = run_suite(setting, cells, out, ABOUT)
    assert [failure.name for failure in failures] == ["needle, chain"] and "10000" in failures[0].error
    result = read_suite(out)
    assert [cell["name"] for cell in result["cells"]] == ["needle, full", "tools, full"]
    assert "needle, chain" in write_report(out)[0].read_text()
    measured: list[str] = []
    cell_of = suite_run.run_cell
    monkeypatch.setattr(suite_run, "run_cell", lambda s, cell, e: (measured.append(cell.name), cell_of(s, cell, e))[1])
    assert len(run_suite(setting, cells, out, ABOUT)) == 1
    assert measured == ["needle, chain"]  # what was done is not done again


def test_an_interrupted_run_goes_on(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, cells, begun = tmp_path / "run.json", (small(), small("tools")), 0
    cell_of = suite_run.run_cell

    def interrupted(s: Setting, cell: Cell, execute: bool) -> dict[str, Any]:
        nonlocal begun
        begun += 1
        if begun == 2:
            raise KeyboardInterrupt
        return cell_of(s, cell, execute)

    monkeypatch.setattr(suite_run, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(setting, cells, out, ABOUT)
    assert not out.exists()
    assert run_suite(setting, cells, out, ABOUT) == []
    assert begun == 3 and len(read_suite(out)["cells"]) == 2


def test_presets_are_what_their_names_say() -> None:
    standard = preset("standard")
    everything = [cell for cell in standard if cell.trial.topology == "full"]
    assert {cell.task for cell in everything} == set(TASKS)
    assert all(cell.methods == tuple(METHODS) for cell in everything)
    assert {cell.trial.topology for cell in standard} == set(TOPOLOGIES)
    desk = next(cell for cell in standard if cell.trial.topology == "trading")
    assert (desk.trial.agents, desk.trial.rounds, desk.trial.answer_tokens) == (19, 4, 16)
    assert [cell.name for cell in preset("paper-smoke")] == [cell.name for cell in preset("paper")]
    assert {(c.trial.prompts, c.trial.answer_tokens) for c in preset("paper-smoke")} == {(1, 512)}
    for name in PRESETS:
        names = [cell.name for cell in preset(name)]
        assert len(set(names)) == len(names)
    with pytest.raises(InvalidInput, match="quick, standard, paper"):
        preset("huge")


def row(case: str, method: str, agent: str = "b", **changed: Any) -> dict[str, Any]:
    plain = {
        "case": case, "agent": agent, "method": method, "reuse": 0.0, "ttft_s": [1.0], "answer_tokens": 4,
        "greedy_run": 4, "tie": False, "flops": 100.0, "expected_error": 0.0, "held_bytes": 10, "mean_kl": 0.0,
        "first_kl": 0.0, "top1": 1.0, "first_token": 1.0, "greedy_run_share": 1.0, "prompt_tokens": 9,
    }  # fmt: skip
    return plain | changed


def test_figures_by_hand() -> None:
    rows = [
        row("p", "dense", "a", ttft_s=[99.0]),
        row("p", "dense", ttft_s=[2.0, 4.0], score=1.0, choice="x", dense_choice="x"),
        row("q", "dense", ttft_s=[2.0, 2.0], score=1.0, choice="y", dense_choice="y"),
        row("p", "kvcomm", "a", ttft_s=[99.0], mean_kl=9.0),
        row("p", "kvcomm", ttft_s=[1.0, 1.0], score=0.0, choice="x", dense_choice="x", mean_kl=0.1, flops=20.0,
            greedy_run=2, held_bytes=30, reuse=0.8),
        row("q", "kvcomm", ttft_s=[0.5, 0.5], score=1.0, choice="x", dense_choice="y", mean_kl=0.3, flops=40.0,
            held_bytes=50, reuse=0.6),
    ]  # fmt: skip
    found = figures(rows, ("dense", "kvcomm"), "a")["kvcomm"]
    assert found["mean_kl"]["value"] == pytest.approx(0.2) and found["mean_kl"]["n"] == 2
    assert found["ttft_p50"]["value"] == pytest.approx(0.75) and found["ttft_p50"]["values"] == 4
    assert found["speedup"]["value"] == pytest.approx(2.5 / 0.75)  # medians of 3, 2 and of 1, 0.5
    assert found["flops_saved"]["value"] == pytest.approx(1 - 60 / 200)
    assert found["held_bytes"]["value"] == 40
    assert found["identical"]["value"] == 0.5
    assert found["judge"]["value"] == 0.5
    assert found["score"]["value"] == 0.5 and found["score_difference"]["value"] == -0.5
    assert found["mcnemar_p"] == 1.0  # one prompt differs: 2 * 1/2
    assert "estimate" not in found


def test_prompts_of_different_cells_are_different_prompts() -> None:
    rows = [row("p", "dense", "a"), row("p", "dense"), row("p", "kvcomm", mean_kl=0.2)]
    cells = [{"name": n, "first": "a", "methods": ("dense", "kvcomm"), "rows": rows} for n in ("one", "two")]
    found = pooled(cells, lambda cell: True)["kvcomm"]
    assert found["mean_kl"]["n"] == 2 and found["mean_kl"]["value"] == pytest.approx(0.2)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text, named in (("{}", "kind"), ("[", "cannot be read"), ('{"kind": "kvcomm evaluation suite"}', "lacks")):
        other.write_text(text)
        with pytest.raises(InvalidInput, match=named):
            read_suite(other)


@pytest.mark.parametrize("column", ["mean_kl", "ttft_s"])
def test_a_number_that_is_not_finite_is_refused_by_name(quick: Path, tmp_path: Path, column: str) -> None:
    result = read_suite(quick)
    kept = result["cells"][1]["rows"][-1]
    kept[column] = [math.inf] if column == "ttft_s" else math.nan
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(result))
    with pytest.raises(InvalidInput, match="broken.json cannot be read .*not a finite number"):
        read_suite(broken)
