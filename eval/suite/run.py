"""A preset measured cell by cell, of which what is done is kept and a failing one is reported; or one cell alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import Progress

from eval.closeness import closeness
from eval.files.output import command_line, require_different, require_writable, write_json
from eval.files.progress import stderr_console
from eval.measure import Row
from eval.methods.registry import methods as find_methods
from eval.running.finished import Finished
from eval.running.jobs import FAILED, Failure, Job, run_jobs, threads_each
from eval.running.setting import Setting
from eval.suite.brief import brief_table, overview
from eval.suite.files import KIND, read_suite
from eval.suite.metrics import figures, slim, summary
from eval.suite.presets import Cell, preset
from eval.suite.report import PAGE_AND_SUMMARY, write_report
from eval.tasks import make_task


def measure_preset(name: str, model: str | None, out: Path | None, execute: bool, jobs: int = 1, seed: int = 0) -> None:
    """Measure a preset and write its figures, page and summary.

    Raises:
        InvalidInput: there is no such preset.
        SystemExit: with FAILED, once everything is written, where a cell failed.
    """
    cells = preset(name, seed)
    out = out or Path(f"results/{name}.json")
    page, summary_path = require_writable(out, *PAGE_AND_SUMMARY)
    require_different(out=out, page=page, summary=summary_path)
    about = {"preset": name, "command": command_line("run"), "seed": seed}
    failures = run_suite(Setting.load(model), cells, out, about, execute, jobs)
    _report(out)
    if failures:
        raise SystemExit(FAILED)


def measure_task(cell: Cell, model: str | None, out: Path, execute: bool) -> None:
    """Measure one cell and write its figures, page and summary.

    Raises:
        KVCommError: as ``run_cell``, or the output cannot be where it should be.
    """
    page, summary_path = require_writable(out, *PAGE_AND_SUMMARY)
    task = {"task": Path(cell.task)} if cell.task.endswith(".jsonl") else {}
    require_different(**task, out=out, page=page, summary=summary_path)
    setting = Setting.load(model)
    part = run_cell(setting, cell, execute)
    about = {"preset": cell.name, "command": command_line("run"), "seed": cell.trial.seed}
    _write(out, setting.describe() | {"jobs": 1}, about, [part], [])
    _report(out)


def _report(out: Path) -> None:
    """The page and the summary beside ``out``; the figures in brief and the paths on the terminal."""
    shown = overview(read_suite(out))
    if shown is not None:
        stderr_console().print(brief_table(shown))
    for path in (out, *write_report(out)):
        print(path)


def run_suite(
    setting: Setting,
    cells: Sequence[Cell],
    out: Path,
    about: dict[str, Any],
    execute: bool = False,
    jobs: int = 1,
) -> list[Failure]:
    """Measure ``cells`` and write ``out``, whatever fails; say how far it is and how long it will take on stderr.

    Cells that are done are kept beside ``out`` until all are: a run that was interrupted goes on behind them, and one
    in which cells failed tries those again.

    Args:
        about: what the output says besides figures: preset, command, seed.
        execute: whether answers may be run as programs to score them.
        jobs: cells measured at once, each in a process of its own.
    """
    described = setting.describe() | {"threads": threads_each(jobs), "jobs": jobs}
    finished = Finished(
        out.with_suffix(".parts.jsonl"), {**described, "execute": execute, "cells": [_about(cell) for cell in cells]}
    )
    parts = [Job(cell.name, cell.cost, run_cell, (cell, execute)) for cell in cells]
    failures = run_jobs(setting, parts, finished, jobs)
    done = [finished.get(cell.name) for cell in cells if finished.get(cell.name) is not None]
    failed = [{"cell": failure.name, "error": failure.error} for failure in failures]
    _write(out, described, about, done, failed)
    if not failures:
        finished.clear()
    return failures


def _write(
    out: Path,
    described: dict[str, Any],
    about: dict[str, Any],
    done: list[dict[str, Any]],
    failed: list[dict[str, str]],
) -> None:
    date = datetime.now(UTC).date().isoformat()
    write_json(out, {"kind": KIND, "date": date, **described, **about, **summary(done), "failed": failed})


def run_cell(setting: Setting, cell: Cell, execute: bool = False) -> dict[str, Any]:
    """One cell's figures and rows.

    Raises:
        KVCommError: the task cannot be had, or not in these sizes, or the pool changed while it was measured.
    """
    started = time.perf_counter()
    source = make_task(cell.task, execute)
    chosen = find_methods(list(cell.methods))
    bench = cell.trial.prepare(setting, source.problems(), chosen)
    with Progress(console=stderr_console(), transient=True) as progress:
        rows = (bench.run if cell.every_call else bench.run_hearers)(progress, cell.name)
    problems = {case.problem.id: case.problem for case in bench.workload.measured}
    for row in rows:
        if "own_answer" in row and (score := source.score(problems[row["case"]], row["own_answer"])) is not None:
            row["score"] = score
    rounding = [row for row in rows if row["method"] == "yardstick" and row["agent"] != bench.first_agent]
    kept: list[Row] = [slim(row) for row in rows if row["method"] != "yardstick"]
    return {
        "name": cell.name,
        "task": cell.task,
        "topology": cell.trial.topology,
        "calls": len(bench.workload.nodes),
        "agents": len({node.role.name for node in bench.workload.nodes}),
        "first": bench.first_agent,
        "trial": asdict(cell.trial),
        "about": {name: method.about for name, method in chosen.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "learned": bench.facts(),
        "yardstick": closeness(rounding),
        "methods": figures(kept, cell.methods, bench.first_agent),
        "rows": kept,
    }


def _about(cell: Cell) -> dict[str, Any]:
    policies = {name: repr(method.policy) for name, method in find_methods(list(cell.methods)).items()}
    return {"task": cell.task, "trial": asdict(cell.trial), "methods": policies, "every_call": cell.every_call}
