"""Two results files side by side: verdicts, how often they are wrong, and what is not compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from eval.figures.statistics import Estimate
from eval.suite import compare as module
from eval.suite.compare import compare, compare_suites, lines
from eval.suite.files import KIND, read_suite
from kvcomm.errors import InvalidInput

Result = dict[str, Any]
TRIAL = {"prompts": 20, "prompt_tokens": 600, "fill_prompts": 2, "answer_tokens": 12, "repeats": 1}
FIGURES = dict.fromkeys(
    ("mean_kl", "first_kl", "top1", "first_token", "reuse", "flops_saved"),
    {"value": 0.0, "low": 0.0, "high": 0.0, "n": 1},
)
PLAIN = {"mean_kl": 0.0, "first_kl": 0.0, "top1": 1.0, "reuse": 0.0, "flops": 100.0}


def row(case: str, method: str, **changed: Any) -> dict[str, Any]:
    return {"case": case, "agent": "b", "method": method, "ttft_s": [1.0], **PLAIN, **changed}


def suite(cells: dict[str, list[dict[str, Any]]]) -> Result:
    """A results file of cells given by their rows; their figures are not what is compared."""
    head = {"command": "", "pooled": {}, "failed": [], "preset": "quick"}
    filled = {"task": "", "topology": "full", "calls": 2, "agents": 2, "first": "a", "about": {}, "seconds": 1.0,
              "yardstick": {"mean_kl": 0.0}, "trial": TRIAL}  # fmt: skip
    made = [
        {"name": name, "methods": {r["method"]: FIGURES for r in rows}, "rows": rows, **filled}
        for name, rows in cells.items()
    ]
    about = {"model": "m", "model_digest": "d" * 64, "threads": 1, "machine": "abacus", "versions": {"torch": "1"}}
    return {"kind": KIND, **about, **head, "cells": made}


def result(kl: float, ttft: float, prompts: int = 20) -> Result:
    rows = []
    for n in range(prompts):
        rows.append(row(f"p{n}", "dense", ttft_s=[1.0 + 0.01 * (n % 3)]))
        noise = 0.02 * ((n * 7) % 5 - 2)
        rows.append(row(f"p{n}", "kvcomm", mean_kl=kl + noise / 10, ttft_s=[ttft * (1 + noise)]))
    return suite({"c": rows, "d": copy.deepcopy(rows)})


def verdicts(before: Result, after: Result) -> dict[str, str]:
    return {c.metric: c.verdict for c in compare_suites(before, after).changes if c.method == "kvcomm"}


def test_what_became_worse_and_better_is_told_apart_from_noise() -> None:
    found = verdicts(result(0.10, 0.5), result(0.20, 0.4))
    assert (found["mean KL"], found["TTFT over dense"], found["reuse"]) == ("worse", "better", "same")
    noisy = result(0.10, 0.5)
    for n, entry in enumerate(noisy["cells"][0]["rows"]):
        entry["mean_kl"] *= 1 + 0.1 * (-1) ** (n // 2)
    assert verdicts(result(0.10, 0.5), noisy)["mean KL"] == "cannot be told apart"


def test_from_few_prompts_nothing_is_concluded() -> None:
    # one figure differs: 2 / 2^6 is the first below 0.05; two cells of 2 and of 3 prompts
    assert verdicts(result(0.10, 0.5, prompts=2), result(0.90, 0.5, prompts=2))["mean KL"] == "too few prompts"
    assert verdicts(result(0.10, 0.5, prompts=3), result(0.90, 0.5, prompts=3))["mean KL"] == "worse"
    assert compare_suites(result(0.10, 0.5), result(0.90, 0.5)).needed == 6


def test_what_floats_alone_differ_in_is_the_same() -> None:
    before, after = result(0.10, 0.5), result(0.10, 0.5)
    for n, entry in enumerate(after["cells"][0]["rows"]):
        entry["first_kl"] += 1e-8
        entry["flops"] *= 1 + 1e-7
        entry["reuse"] += 1e-6 * (n == 1)
    found = verdicts(before, after)
    assert (found["first-token KL"], found["prefill FLOPs"]) == ("same", "same")
    assert found["reuse"] == "cannot be told apart"  # one prompt


def noise(rng: np.random.Generator, prompts: int, methods: int, worse: float = 1.0) -> Result:
    """Lognormal values of which every figure but one has its mean from nothing but chance."""
    rows = [row(f"p{n}", "dense") for n in range(prompts)]
    for m in range(methods):
        drawn = rng.lognormal(size=(prompts, 5)).tolist()
        rows += [row(f"p{n}", f"m{m}", **dict(zip(PLAIN, values, strict=True))) for n, values in enumerate(drawn)]
    for entry in rows:
        if entry["method"] == "m0":
            entry["mean_kl"] *= worse
    return suite({"c": rows})


@pytest.fixture
def without_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take nearly all the time, and no part in verdicts."""
    monkeypatch.setattr(module, "mean_difference", lambda old, new: Estimate(0.0, 0.0, 0.0, len(old)))


@pytest.mark.usefixtures("without_intervals")
def test_comparisons_are_wrong_in_at_most_one_of_twenty() -> None:
    rng, trials, wrong = np.random.default_rng(0), 300, 0
    for _ in range(trials):
        found = compare_suites(noise(rng, 11, 4), noise(rng, 11, 4))
        assert len(found.changes) == 24 and found.needed <= 11
        wrong += any(change.verdict in ("better", "worse") for change in found.changes)
    assert wrong / trials <= 0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5


@pytest.mark.usefixtures("without_intervals")
def test_real_changes_are_found() -> None:
    rng, trials, seen = np.random.default_rng(1), 40, 0
    for _ in range(trials):
        found = compare_suites(noise(rng, 16, 4), noise(rng, 16, 4, worse=10.0))
        seen += [(change.method, change.metric) for change in found.worse][:1] == [("m0", "mean KL")]
    assert seen >= 0.9 * trials


@pytest.fixture
def files(tmp_path: Path) -> Callable[[Result, Result], tuple[Path, Path]]:
    def write(*results: Result) -> tuple[Path, ...]:
        paths = tuple(tmp_path / f"{name}.json" for name in "ab")
        for path, made in zip(paths, results, strict=True):
            path.write_text(json.dumps(made))
        return paths

    return write  # type: ignore[return-value]


def status(paths: tuple[Path, Path]) -> int:
    try:
        compare(*paths)
    except typer.Exit as done:
        return int(done.exit_code)
    return 0


def test_comparison_is_said_and_has_an_exit_status(files: Any) -> None:
    before, after = files(result(0.1, 0.5), result(0.2, 0.5))
    assert (status((before, after)), status((after, before)), status((before, before))) == (3, 0, 0)
    said = "\n".join(lines(compare_suites(read_suite(before), read_suite(after))))
    assert "| worse | kvcomm | mean KL | 0.1 | 0.2 | +0.1 | +0.1 to +0.1 | 1e-05 | 40 |" in said


def altered(change: Callable[[Result], None]) -> Result:
    made = copy.deepcopy(result(0.1, 0.5))
    change(made)
    return made


def drop_cases(made: Result) -> None:
    made["cells"][1]["rows"] = [r for r in made["cells"][1]["rows"] if r["case"] == "p0"]


def drop_method(made: Result) -> None:
    del made["cells"][1]["methods"]["kvcomm"]
    made["cells"][1]["rows"] = [r for r in made["cells"][1]["rows"] if r["method"] != "kvcomm"]


def add_a_call(made: Result) -> None:
    made["cells"][1]["rows"].append(row("p3", "kvcomm", agent="c"))


def drop_top1(made: Result) -> None:
    for entry in made["cells"][1]["rows"]:
        del entry["top1"]


LOST: dict[str, tuple[Callable[[Result], None], str, str]] = {
    "trial": (
        lambda r: r["cells"][1].update(trial=TRIAL | {"prompt_tokens": 1000}),
        "1 cell.", "- d: prompt_tokens 600, then 1000; not compared",
    ),
    "cell": (lambda r: r["cells"].pop(), "1 cell.", "- d: only before"),
    "method": (drop_method, "1 method.", "- d, kvcomm: only before"),
    "case": (drop_cases, "38 cases.", "- d, kvcomm: 19 (p1, p2, p3, p4, p5, …) of 20 cases only before"),
    "calls": (add_a_call, "1 case.", "- d, kvcomm: 1 (p3) of 20 cases with other calls; not compared"),
    "figure": (drop_top1, "1 figure.", "- kvcomm, top-1 agreement: 20 (d: p0, d: p1, "),
    "failed": (
        lambda r: (r["cells"].pop(), r["failed"].append({"cell": "d", "error": "no wheel"})),  # type: ignore[dict-item]
        "1 cell.", "- d: failed after (no wheel)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LOST)
def test_what_is_not_compared_is_counted_named_and_fails(what: str, files: Any, capsys: Any) -> None:
    change, counted, said = LOST[what]
    assert status(files(result(0.1, 0.5), altered(change))) == 4
    shown = capsys.readouterr().out
    assert f"Not compared: {counted}" in shown and said in shown
    if what not in ("trial", "calls", "failed"):  # more than before is named, and no fault
        assert status(files(altered(change), result(0.1, 0.5))) == 0
        assert said.replace("only before", "only after") in capsys.readouterr().out


def test_texts_of_the_files_steer_no_terminal_and_are_no_markup(files: Any, capsys: Any) -> None:
    bad = "d\n# Head\n<script>\x1b]0;title\x07 ![i](http://127.0.0.1/x.png)"

    def hostile(made: Result) -> None:
        made["machine"] = bad
        made["failed"] = [{"cell": bad, "error": bad}]

    status(files(result(0.1, 0.5), altered(hostile)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "<script>" not in shown and "\n#" not in shown and "](" not in shown
    assert "\\x1b]0;title\\x07" in shown


def test_worse_goes_before_incomplete(files: Any) -> None:
    after = result(0.2, 0.5)
    after["cells"].pop()
    assert status(files(result(0.1, 0.5), after)) == 3


def test_where_nothing_can_be_compared_it_says_why(files: Any) -> None:
    def failed(made: Result) -> None:
        made["cells"] = []
        made["failed"] = [{"cell": "c", "error": "no room"}, {"cell": "d", "error": "no wheel"}]

    def longer(made: Result) -> None:
        for cell in made["cells"]:
            cell["trial"] = TRIAL | {"seed": 1}

    for change, why in ((failed, r"d: failed after \(no wheel\)"), (longer, "seed unknown, then 1; not compared")):
        with pytest.raises(InvalidInput, match=f"nothing to compare: .*{why}"):
            status(files(result(0.1, 0.5), altered(change)))
    with pytest.raises(InvalidInput, match=r"cells\[0\].rows\[0\].ttft_s\[0\] is 0.0, it must be above 0"):
        status(files(result(0.1, 0.5), altered(lambda r: r["cells"][0]["rows"][0].update(ttft_s=[0.0]))))


def test_other_settings_are_said_first_and_compared(files: Any, capsys: Any) -> None:
    other = {"model_digest": "e" * 64, "threads": 4, "versions": {"torch": "2"}, "code": "f" * 64, "preset": "paper"}
    assert status(files(result(0.1, 0.5), altered(lambda r: r.update(other)))) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"Other weights: model m, then m (weights {'d' * 16}, then {'e' * 16})."
    differ = f"differ: preset quick, then paper; threads 1, then 4; torch 1, then 2; code unknown, then {'f' * 16}"
    assert shown[2] == differ
    assert status(files(result(0.1, 0.5), result(0.1, 0.5))) == 0
    assert not capsys.readouterr().out.startswith(("Other", "differ"))
