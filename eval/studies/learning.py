"""``python -m eval learning``: closeness against the number of calls that an agent's offsets were learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from eval.closeness import closeness
from eval.files.output import command_line, require_writable, write_figure, write_json
from eval.files.progress import stderr_console
from eval.measure import Row
from eval.methods.registry import METHODS, Method
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.trial import Bench, Trial
from kvcomm.reuse.policy import Balanced, Reuse
from kvcomm.reuse.select import Leading

app = typer.Typer(help="How many calls offsets need.", add_completion=False, pretty_exceptions_enable=False)
CALLS = (0, 1, 2, 4, 8, 16, 32)
WARMED = "warmed"
PAIRS = {"kvcomm-fast": "ablation-no-offsets", "kvcomm": "ablation-no-offsets-predicted"}
"""Methods with offsets, and each the same without."""


def methods() -> dict[str, Method]:
    """What is measured at each number of calls."""
    return {
        "dense": METHODS["dense"],
        "kvcomm-fast": METHODS["kvcomm-fast"],
        "kvcomm": METHODS["kvcomm"],
        "ablation-no-offsets": Method(Reuse(offsets=False, select=Leading(0)), "nothing added, nothing recomputed"),
        "ablation-no-offsets-predicted": Method(
            Reuse(offsets=False, select=Balanced().select), "as many recomputed as in kvcomm"
        ),
    }


@app.command()
def learning(
    task: Annotated[str, typer.Option(help="Kind of text.")] = "humaneval",
    topology: Annotated[str, typer.Option(help="Who hears whom.")] = "full",
    agents: Annotated[int, typer.Option(help="Agents, the one included that hears nobody.")] = 5,
    prompts: Annotated[int, typer.Option(help="Problems to measure.")] = 4,
    calls: Annotated[int, typer.Option(help="Calls of each agent to learn from at most.")] = max(CALLS),
    warm_calls: Annotated[int, typer.Option(help="Calls with stand-in texts, for the warmed agents.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 700,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write; the plot goes beside it.")] = Path(
        "results/learning.json"
    ),
) -> None:
    """Measure the same prompts after 0, 1, 2, 4, ... real calls of each agent, and after warming alone.

    All agents are new: at 0 nothing at all was learned. Warmed agents saw prefills of their templates with texts of the
    task in the slots, nothing generated.
    """
    (plot,) = require_writable(out, ".svg")

    def trial(fill: int, by: str) -> Trial:
        return Trial(topology, agents, prompts, fill, prompt_tokens, answer_tokens, 1, seed, by)

    warm, learned = trial(warm_calls, "prefill"), trial(calls, "generate")
    setting = Setting.load(model)
    problems = make_task(task).problems()

    curve: list[dict[str, Any]] = []
    with Progress(console=stderr_console()) as progress:
        warmed = warm.prepare(setting, problems, methods())
        curve.append(
            {"calls": WARMED, "prefills": warm_calls, "methods": _measure(warmed, warmed.run_hearers(progress, WARMED))}
        )
        real = learned.prepare(setting, problems, methods())
        steps = real.learn()
        checkpoints = [n for n in CALLS if n <= calls]
        bar = progress.add_task("calls", total=calls)
        for seen, wanted in zip([0, *checkpoints], checkpoints, strict=False):
            for _ in range((wanted - seen) * len(real.workload.nodes)):
                next(steps)
            curve.append({"calls": wanted, "methods": _measure(real, list(real.rows_of_hearers()))})
            progress.update(bar, completed=wanted, description=f"after {wanted} calls")
    result = {
        **setting.describe(),
        "command": command_line("learning"),
        "setting": {
            "task": task,
            "topology": topology,
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "seed": seed,
        },
        "curve": curve,
        "half_of_the_gain": {name: half_of_the_gain(curve, name) for name in PAIRS},
    }
    write_json(out, result)
    draw(result, plot)
    print(out)


def _measure(bench: Bench, rows: list[Row]) -> dict[str, Any]:
    """Closeness of each method but dense, and of how many prompts."""
    chosen = {name: [row for row in rows if row["method"] == name] for name in bench.methods if name != "dense"}
    return {name: closeness(mine) | {"n": len(mine)} for name, mine in chosen.items()}


def half_of_the_gain(curve: list[dict[str, Any]], method: str) -> int | None:
    """The fewest calls after which ``method`` has half of the gain in mean KL of the end; None without gain."""
    points = [point for point in curve if point["calls"] != WARMED]

    def gain(point: dict[str, Any]) -> float:
        return float(point["methods"][PAIRS[method]]["mean_kl"] - point["methods"][method]["mean_kl"])

    final = gain(points[-1])
    if final <= 0:
        return None
    return next(int(point["calls"]) for point in points if gain(point) >= final / 2)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write an SVG: mean KL against calls, each method with and without offsets, the warmed agents at the left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    curve = result["curve"]
    for axes, (method, plain) in zip(figure.subplots(1, 2), PAIRS.items(), strict=True):
        for name, style in ((method, "o-"), (plain, "s--")):
            axes.plot(
                range(len(curve)),
                [point["methods"][name]["mean_kl"] for point in curve],
                style,
                label=name,
                markersize=4,
            )
        axes.set_xticks(range(len(curve)), [str(point["calls"]) for point in curve])
        axes.set(
            xlabel="calls of each agent that were learned from", ylabel="mean KL, nats", title=method, ylim=(0, None)
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    write_figure(path, figure)
