"""The document made of a results file: what is lost is found by hand-made cells, plots are SVG that stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eval.suite.doc import document
from eval.suite.files import KIND
from eval.suite.losses import losses
from eval.suite.metrics import figures, pooled
from eval.suite.report import report

METHODS = ("dense", "exact", "leading", "attended", "kvcomm", "kvcomm-fast")
KL = {"dense": 0.0, "exact": 0.0, "leading": 0.05, "attended": 0.02, "kvcomm": 0.03, "kvcomm-fast": 0.01}
SECONDS = {"dense": 1.0, "exact": 0.9, "leading": 0.5, "attended": 0.7, "kvcomm": 0.95, "kvcomm-fast": 1.25}
WRONG = {"kvcomm": ("p2", "p3")}
"""Which prompts a method does not solve."""


def row(method: str, case: str, agent: str) -> dict[str, Any]:
    found = {
        "case": case, "agent": agent, "method": method, "reuse": 0.5, "ttft_s": [SECONDS[method]], "answer_tokens": 4,
        "greedy_run": 4, "tie": False, "flops": 100.0, "expected_error": 0.0, "held_bytes": 2**20, "first_kl": 0.0,
        "mean_kl": KL[method] + 0.001 * int(case[1]), "top1": 0.9, "first_token": 1.0, "greedy_run_share": 1.0,
        "prompt_tokens": 9,
    }  # fmt: skip
    if agent == "b":
        found["score"] = float(case not in WRONG.get(method, ()))
    return found


def cell(task: str, topology: str) -> dict[str, Any]:
    rows = [row(method, f"p{n}", agent) for n in range(4) for agent in "ab" for method in METHODS]
    trial = {"prompts": 4, "prompt_tokens": 600, "fill_prompts": 2, "answer_tokens": 12, "repeats": 1}
    return {
        "name": f"{task}, {topology}", "task": task, "topology": topology, "calls": 2, "agents": 2, "first": "a",
        "trial": trial, "about": {name: f"what {name} does" for name in METHODS}, "yardstick": {"mean_kl": 1e-3},
        "seconds": 3.0, "methods": figures(rows, METHODS, "a"), "rows": rows,
    }  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    shown = (("needle", "full"), ("tools", "independent"), ("documents", "chain"), ("documents", "debate"))
    cells = [cell(task, topology) for task, topology in shown]
    return {
        "kind": KIND, "date": "2026-01-02", "model": "m", "model_digest": "d" * 64, "threads": 1, "jobs": 2,
        "versions": {"torch": "9"}, "code": "c" * 64, "machine": "2 × abacus", "preset": "standard",
        "command": "python -m eval run --preset standard --jobs 2", "cells": cells,
        "pooled": pooled(cells, lambda one: one["topology"] == "full"),
        "failed": [{"cell": "maths, full", "error": "FetchError: no wheel"}], "remark": "on a train",
    }  # fmt: skip


def test_losses_by_hand(result: dict[str, Any]) -> None:
    found = losses(result["cells"][:1])
    assert found.compared == 2
    # dense over TTFT: exact 1.11, kvcomm 1.05, kvcomm-fast 0.8
    assert [(s.method, s.than) for s in found.slower] == [
        ("kvcomm", "exact"), ("kvcomm-fast", "dense"), ("kvcomm-fast", "exact"),
    ]  # fmt: skip
    (lower,) = found.lower
    assert (lower.method, lower.dense, lower.score, lower.difference["value"]) == ("kvcomm", 1.0, 0.5, -0.5)
    assert lower.p == 0.5  # two prompts, both lost: 2 / 2^2
    (closer,) = found.closer
    assert (closer.method, closer.peer, closer.others) == ("kvcomm", "attended", ())
    assert closer.difference.value == pytest.approx(-0.01) and closer.difference.n == 4
    cell = result["cells"][0]
    idle = {**cell["methods"]["attended"], "reuse": {"value": 0.0}}  # it ran dense
    assert losses([{**cell, "methods": {**cell["methods"], "attended": idle}}]).closer == ()


def test_without_losses_it_says_nowhere(result: dict[str, Any]) -> None:
    dull = [{**result["cells"][0], "methods": {n: result["cells"][0]["methods"][n] for n in ("dense", "exact")}}]
    found = losses(dull)
    assert (found.compared, found.slower, found.lower, found.closer) == (0, (), (), ())
    text, _ = document(result | {"cells": dull, "pooled": {}, "failed": []}, "x.json", "results")
    assert text.count("Nowhere.") == 3 and "Not measured" not in text


def test_the_document_says_how_to_repeat_it_and_every_figure(result: dict[str, Any]) -> None:
    text, plots = document(result, "../results/standard.json", "results")
    for said in (
        "`python -m eval run --preset standard --jobs 2`", "2026-01-02",
        "2 × abacus; 2 cells at once, each with 1 thread",
        "torch 9", "| remark | on a train |", "| maths, full | FetchError: no wheel |", "(../results/standard.json)",
        "### needle, full", "### tools, independent", "### documents, debate",
        "| needle, full | kvcomm | attended | 0.032 |",
    ):  # fmt: skip
        assert said in text, said
    head = "| method | n | speed-up | mean KL | top-1 | score | reuse | prefill FLOPs saved | TTFT p50 | TTFT p95 |"
    assert text.count(head) == 5  # all tasks together, two tasks, two topologies
    kvcomm = next(line for line in text.splitlines() if line.startswith("| kvcomm | 4 |"))
    assert "(" in kvcomm and "| 0.5 |" in kvcomm and "1.0 MiB" in kvcomm
    for line in text.splitlines():
        if line.startswith("!["):
            assert line[line.index("(") + 1 : -1] in plots
    assert len(plots) == text.count("![") == 4


def test_plots_stand_alone(result: dict[str, Any]) -> None:
    _, plots = document(result, "x.json", "results")
    for name, plot in plots.items():
        root = ElementTree.fromstring(plot)  # noqa: S314  ours
        assert root.tag == "{http://www.w3.org/2000/svg}svg", name
        inner = root.findall("{http://www.w3.org/2000/svg}svg")
        assert len(inner) == 2 and float(inner[1].attrib["x"]) >= float(inner[0].attrib["width"])
        assert "--card:" in plot and "prefers-color-scheme: dark" in plot and "var(--nothing)" not in plot
        assert set(plot.split("var(")[1:]) and all(f"{p.split(')')[0]}:" in plot for p in plot.split("var(")[1:])


def test_the_command_writes_it_beside_its_plots(result: dict[str, Any], tmp_path: Path) -> None:
    source, doc = tmp_path / "results" / "standard.json", tmp_path / "docs" / "results.md"
    source.parent.mkdir()
    source.write_text(json.dumps(result))
    report(source, doc=doc)
    assert "(../results/standard.json)" in doc.read_text()
    for line in doc.read_text().splitlines():
        if line.startswith("!["):
            assert (doc.parent / line[line.index("(") + 1 : -1]).exists()
