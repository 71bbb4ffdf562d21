"""``python -m eval plan paper``: whether each cell of a preset can be built, and how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.cases.workload import build
from eval.files.output import markdown_table
from eval.suite.files import read_suite
from eval.suite.presets import PRESETS, Cell, preset
from eval.tasks import make_task
from eval.topologies import TOPOLOGIES
from kvcomm.errors import InvalidInput, KVCommError
from kvcomm.hf.template import Template

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Planned:
    """A cell whose texts were cut; nothing was run.

    Attributes:
        shortest, longest: tokens of the last call's prompt over the measured cases, its messages at full length.
        error: why it cannot be built; empty where it can.
    """

    cell: Cell
    calls: int = 0
    shortest: int = 0
    longest: int = 0
    error: str = ""


def planned(cell: Cell, tokenizer: Any) -> Planned:
    """Cut a cell's texts as a run would."""
    trial = cell.trial
    try:
        workload = build(
            make_task(cell.task, execute=False).problems(),
            partial(TOPOLOGIES[trial.topology], rounds=trial.rounds),
            tokenizer,
            agents=trial.agents,
            prompt_tokens=trial.prompt_tokens,
            answer_tokens=trial.answer_tokens,
            measured=trial.prompts,
            fill=trial.fill_prompts,
            seed=trial.seed,
        )
    except KVCommError as error:
        return Planned(cell, error=f"{type(error).__name__}: {error}")
    last = workload.nodes[-1]
    fixed = sum(len(part) for part in Template(last.name, last.template(), tokenizer).fixed)
    own = [sum(len(segment) for segment in case.slots.values()) for case in workload.measured]
    heard = trial.answer_tokens * len(last.hears)
    return Planned(cell, len(workload.nodes), fixed + heard + min(own), fixed + heard + max(own))


def cost_per_second(results: Path, cells: Sequence[Cell]) -> float:
    """How much of ``Cell.cost`` a second did in a measured run of ``cells``.

    Raises:
        InvalidInput: the file is of another preset.
    """
    seconds = {cell["name"]: cell["seconds"] for cell in read_suite(results)["cells"]}
    costs = {cell.name: cell.cost for cell in cells if cell.name in seconds}
    if not costs:
        raise InvalidInput(f"{results} has none of the cells {', '.join(cell.name for cell in cells)}; give its preset")
    return sum(costs.values()) / sum(seconds[name] for name in costs)


@app.command()
def plan(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(PRESETS)}.")],
    measured: Annotated[
        Path | None, typer.Option(help="A results file of a preset, quick say: its seconds give this one's.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder; only its tokenizer is loaded.")] = None,
) -> None:
    """Cut every cell's texts without running anything; exit status 1 if one cannot be built."""
    from eval.models.default import load_tokenizer

    rate = None
    if measured is not None:
        rate = cost_per_second(measured, preset(read_suite(measured)["preset"]))
    tokenizer = load_tokenizer(model)
    found = [planned(cell, tokenizer) for cell in preset(name)]
    hours = [f"{one.cell.cost / rate / 3600:.2f} h" if rate else "" for one in found]
    rows = [
        [
            one.cell.name, f"{one.cell.trial.prompts} + {one.cell.trial.fill_prompts}", str(one.calls),
            one.error or f"{one.shortest} to {one.longest}", str(len(one.cell.methods)), time,
        ]
        for one, time in zip(found, hours, strict=True)
    ]  # fmt: skip
    typer.echo(markdown_table(("cell", "measured + learned", "calls", "last prompt, tokens", "methods", "time"), rows))
    if rate:
        typer.echo(f"\n{sum(one.cell.cost for one in found) / rate / 3600:.1f} hours in all, in one process.")
    if any(one.error for one in found):
        raise typer.Exit(1)
