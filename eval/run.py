"""``python -m eval run``: methods side by side on one task, with every cost inside TTFT and closeness beside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eval.cells import cells, closeness
from eval.jobs import JobsOption
from eval.measure import Row
from eval.methods import methods as find_methods
from eval.output import command_line, write_json
from eval.progress import stderr_console
from eval.setting import Setting
from eval.suite.presets import PRESETS
from eval.suite.run import measure_preset
from eval.tasks import TASKS, make_task
from eval.tasks.base import Task
from eval.topologies import TOPOLOGIES
from eval.trial import Trial
from eval.workload import Workload
from kvcomm.errors import InvalidInput

app = typer.Typer(help="Compare methods on a task.", pretty_exceptions_enable=False)


@app.command()
def run(
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}; quick without --task.")] = None,
    task: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(TASKS)}, or the path of a .jsonl file, instead of a preset.")
    ] = None,
    topology: Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")] = "full",
    agents: Annotated[int, typer.Option(help="How many agents; 19 in trading.")] = 5,
    rounds: Annotated[int, typer.Option(help="How often the topology's pattern is gone through; 4 in trading.")] = 1,
    methods: Annotated[str, typer.Option(help="Comma-separated; dense and exact are always measured.")] = (
        "dense,exact,rerotate,leading,kvcomm"
    ),
    prompts: Annotated[int, typer.Option(help="Problems to measure.")] = 4,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1500,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often each TTFT is taken.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    fill_by: Annotated[str, typer.Option(help="Messages to learn from: generate (real ones) or prefill.")] = "generate",
    execute: Annotated[bool, typer.Option(help="Run answers in a sandbox to score them.")] = False,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    jobs: JobsOption = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; results/run.json, or the preset's name.")
    ] = None,
) -> None:
    """Measure a preset, or one task: TTFT, reuse and closeness of several methods; the pool is frozen meanwhile.

    A preset has sizes and methods of its own: of the other options it takes model, execute, jobs and out.
    """
    if task is None or preset is not None:
        if task is not None:
            raise InvalidInput(f"--task {task} and --preset {preset} were both given; give one")
        measure_preset(preset or "quick", model, out, execute, jobs)
        return
    if jobs != 1:
        raise InvalidInput(f"--jobs {jobs} with --task {task}: one task is one part; give a --preset, or no --jobs")
    out = out or Path("results/run.json")
    names = list(dict.fromkeys(["dense", "exact", *methods.split(",")]))
    chosen = find_methods(names)
    trial = Trial(topology, agents, prompts, fill_prompts, prompt_tokens, answer_tokens, repeats, seed, fill_by, rounds)
    source = make_task(task, execute)
    problems = source.problems()
    setting = Setting.load(model)
    bench = trial.prepare(setting, problems, chosen)
    with Progress(console=stderr_console()) as progress:
        rows = bench.run(progress, task)
    _score(rows, source, bench.workload)
    about = {"task": task, "topology": topology, "agents": agents, "rounds": rounds}
    measured = [row for row in rows if row["method"] != "yardstick"]
    result = {
        **setting.describe(),
        "seed": seed,
        "command": command_line("run"),
        "setting": asdict(trial) | {"methods": {n: m.about for n, m in chosen.items()}} | bench.facts(),
        "cells": cells(measured, names, about, bench.first_agent),
        "yardstick": closeness(
            [row for row in rows if row["method"] == "yardstick" and row["agent"] != bench.first_agent]
        ),
    }
    write_json(out, result)
    print_cells(result)
    print(out)


def _score(rows: list[Row], source: Task, workload: Workload) -> None:
    """Score the last agent's dense answers, where the task has a score and, if that runs them, was allowed to."""
    problems = {case.problem.id: case.problem for case in workload.measured}
    for row in rows:
        if row["method"] == "dense" and row["agent"] == workload.nodes[-1].name:
            score = source.score(problems[row["case"]], row["answer"])
            if score is not None:
                row["score"] = score


def print_cells(result: dict[str, Any]) -> None:
    """The cells as a table on stderr."""
    table = Table(title=f"{result['model']}, last agent's TTFT; means over agents 2 and later")
    for heading in ("method", "TTFT p50", "speed-up", "reuse", "mean KL", "first KL", "top-1", "first token", "n"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for cell in result["cells"]:
        close = cell["closeness"]
        table.add_row(
            cell["method"],
            f"{cell['ttft_s']['p50']:.3f} s",
            f"{cell['speedup']:.2f}×",
            f"{cell['reuse']:.1%}",
            f"{close['mean_kl']:.4f}",
            f"{close['first_kl']:.4f}",
            f"{close['top1']:.3f}",
            f"{close['first_token']:.3f}",
            str(cell["n"]),
        )
    yardstick = result["yardstick"]
    table.caption = f"yardstick, dense bfloat16: mean KL {yardstick['mean_kl']:.4f}, top-1 {yardstick['top1']:.3f}"
    Console(stderr=True, width=120).print(table)
