"""``python -m eval run``: methods side by side on one task, with every cost inside TTFT and closeness beside it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eval.cells import cells, closeness
from eval.measure import Row, fill, measure, own_engines, register
from eval.methods import methods as find_methods
from eval.progress import stderr_console
from eval.setting import Setting
from eval.tasks import TASKS, make_task
from eval.topologies import TOPOLOGIES
from eval.workload import Workload, build
from kvcomm import Engine
from kvcomm.errors import InvalidInput, KVCommError

app = typer.Typer(help="Compare methods on a task.", pretty_exceptions_enable=False)


@app.command()
def run(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}, or the path of a .jsonl file.")] = "humaneval",
    topology: Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")] = "full",
    agents: Annotated[int, typer.Option(help="How many agents.")] = 5,
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
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/run.json"),
) -> None:
    """Measure TTFT, reuse and closeness of several methods; the pool is frozen while it is measured."""
    names = list(dict.fromkeys(["dense", "exact", *methods.split(",")]))
    chosen = find_methods(names)
    if topology not in TOPOLOGIES or fill_by not in ("generate", "prefill") or repeats < 1:
        raise InvalidInput(
            f"topology {topology!r} must be one of {sorted(TOPOLOGIES)}, fill-by {fill_by!r} generate or prefill, and "
            f"repeats {repeats} at least 1"
        )
    source = make_task(task, execute)
    problems = source.problems()
    setting = Setting.load(model)
    workload = build(
        problems,
        TOPOLOGIES[topology],
        setting.tokenizer,
        agents=agents,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        measured=prompts,
        fill=fill_prompts,
        seed=seed,
    )
    engine, rounded = setting.engine(), setting.rounded()
    register(engine, workload)
    register(rounded, workload)
    engines = own_engines(engine, chosen)
    rows: list[Row] = []
    with Progress(console=stderr_console()) as progress:
        _filled(engine, list(engines.values()), workload, fill_by == "generate", progress)
        before = (engine.book.statistics.digest(), engine.pool.digest())
        step = progress.add_task("measuring", total=prompts * agents * (len(chosen) + 1))
        for case in workload.measured:
            for row in measure(engine, workload, case, chosen, repeats, rounded, engines):
                last = workload.nodes[-1].name
                final = row["agent"] == last and row["method"] == "dense"
                score = source.score(case.problem, row["answer"]) if final else None
                if score is not None:
                    row["score"] = score
                rows.append(row)
                progress.advance(step)
    if before != (engine.book.statistics.digest(), engine.pool.digest()):
        raise KVCommError("the pool changed while it was measured; the figures are void")
    first = workload.nodes[0].name
    about = {"task": task, "topology": topology, "agents": agents}
    result = {
        **setting.describe(),
        "seed": seed,
        "command": shlex.join(["python", "-m", "eval", "run", *_arguments()]),
        "setting": {
            "prompts": prompts,
            "fill_prompts": fill_prompts,
            "fill_by": fill_by,
            "prompt_tokens": prompt_tokens,
            "answer_tokens": answer_tokens,
            "repeats": repeats,
            "methods": {name: method.about for name, method in chosen.items()},
            "pool_digest": before[0],
            "pool_bytes": engine.pool.nbytes,
            "offset_bytes": engine.book.statistics.nbytes,
            "warm_up": "the fill runs the same shapes before anything is timed",
        },
        "cells": cells([row for row in rows if row["method"] != "yardstick"], names, about, first),
        "yardstick": closeness([row for row in rows if row["method"] == "yardstick" and row["agent"] != first]),
    }
    write_json(out, result)
    print_cells(result)
    print(out)


def _arguments() -> list[str]:
    given = sys.argv[1:]
    return given[1:] if given[:1] == ["run"] else given


def _filled(engine: Engine, others: list[Engine], workload: Workload, generate: bool, progress: Progress) -> None:
    step = progress.add_task("learning from other problems", total=len(workload.fill) * len(workload.nodes))
    for _ in fill(engine, workload, generate, others):
        progress.advance(step)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write ``result``; figures are numbers, never null or NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


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
