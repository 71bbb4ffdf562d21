"""``python -m eval run``: a preset, or methods side by side on one task."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from eval.methods.registry import METHODS
from eval.methods.registry import methods as find_methods
from eval.running.jobs import JobsOption
from eval.suite.presets import PRESETS, Cell
from eval.suite.run import measure_preset, measure_task
from eval.tasks import TASKS, make_task
from eval.topologies import TOPOLOGIES
from eval.trial import Trial
from kvcomm.errors import InvalidInput

app = typer.Typer(help="Compare methods.", add_completion=False, pretty_exceptions_enable=False)
OF_PRESETS = ("preset", "seed", "execute", "model", "jobs", "out")
"""Options that a preset takes; it has sizes and methods of its own."""


@app.command()
def run(
    context: typer.Context,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}; quick without --task.")] = None,
    task: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(TASKS)}, or the path of a .jsonl file, instead of a preset.")
    ] = None,
    topology: Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")] = "full",
    agents: Annotated[int, typer.Option(help="How many agents; 19 in trading.")] = 5,
    rounds: Annotated[int, typer.Option(help="How often the topology's pattern is gone through; 4 in trading.")] = 1,
    methods: Annotated[
        str, typer.Option(help=f"Of {', '.join(METHODS)}; comma-separated. Dense and exact are always measured.")
    ] = "rerotate,leading,kvcomm",
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
    """Measure a preset, or one task: TTFT, reuse and closeness of several methods, into JSON, a page and a summary.

    A preset has sizes and methods of its own: of the other options it takes seed, execute, model, jobs and out.
    """
    if task is None:
        refuse(context, [name for name in signature(run).parameters if name not in ("context", "task", *OF_PRESETS)])
        measure_preset(preset or "quick", model, out, execute, jobs, seed)
        return
    if preset is not None:
        raise InvalidInput(f"--task {task} and --preset {preset} were both given; give one")
    if jobs != 1:
        raise InvalidInput(f"--jobs {jobs} with --task {task}: one task is one part; give a --preset, or no --jobs")
    names = tuple(dict.fromkeys(["dense", "exact", *methods.split(",")]))
    find_methods(list(names))
    make_task(task, execute).problems()  # what is wrong with them is said before a model is loaded
    scored = execute or task != "humaneval"  # its answers are programs
    trial = Trial(topology, agents, prompts, fill_prompts, prompt_tokens, answer_tokens, repeats, seed, fill_by, rounds,
                  own_answers=scored)  # fmt: skip
    measure_task(Cell(task, trial, names, every_call=True), model, out or Path("results/run.json"), execute)


def refuse(context: typer.Context, names: list[str]) -> None:
    """Refuse options that were given and would do nothing.

    Raises:
        InvalidInput: one of ``names`` is on the command line.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidInput(f"{options}: a preset has its own; give a --task to choose, or leave {options} out")
