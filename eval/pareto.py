"""``python -m eval pareto``: closeness against recompute, our methods and all published ones on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.progress import Progress

from eval.cells import closeness
from eval.measure import Row
from eval.methods import ISOLATED, METHODS, Method
from eval.oracle import TrueDeviation
from eval.output import command_line, write_json
from eval.pareto_plot import draw
from eval.progress import stderr_console
from eval.setting import Setting
from eval.tasks import make_task
from eval.trial import Trial
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.select import Attended, Deviation, LeadingShare, PredictedError, Selection

app = typer.Typer(help="Closeness against recompute, for every method.", pretty_exceptions_enable=False)
SHARES = (0.05, 0.10, 0.15, 0.20, 0.30)
"""Shares of the approximate tokens that are recomputed."""


def points() -> dict[str, Method]:
    """The methods of the plot by name; ``@`` and the share stand behind those that have one."""
    found = {name: METHODS[name] for name in ("dense", "exact", "rerotate", "kvcomm-paper", "kvcomm", "kvcomm-fast")}
    for share in SHARES:
        published: dict[str, Selection] = {
            "leading": LeadingShare(share),
            "deviation": Deviation(share),
            "attended": Attended(share),
        }
        for name, select in published.items():
            isolated = Reuse(origins=ISOLATED, offsets=False, select=select)
            found[f"{name}@{share:g}"] = Method(isolated, f"{name} on isolated bases", isolates=True)
            if name != "leading":
                captured = Reuse(offsets=False, select=select)
                found[f"{name}-captured@{share:g}"] = Method(captured, f"{name} on captured bases")
        plain = Reuse(offsets=False, select=LeadingShare(share))
        found[f"leading-captured@{share:g}"] = Method(plain, "leading on captured bases: ours without offsets")
        found[f"kvcomm-leading@{share:g}"] = Method(Reuse(select=LeadingShare(share)), "offsets, leading tokens")
        found[f"kvcomm-predicted@{share:g}"] = Method(Reuse(select=PredictedError(share)), "offsets, predicted error")
        found[f"oracle@{share:g}"] = Method(Reuse(select=TrueDeviation(share)), "offsets, true deviation")
    return found


@app.command()
def pareto(
    tasks: Annotated[str, typer.Option(help="Kinds of text, comma-separated.")] = "humaneval",
    topologies: Annotated[str, typer.Option(help="Comma-separated.")] = "full,chain",
    prompts: Annotated[int, typer.Option(help="Problems to measure for each task and topology.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    only: Annotated[str, typer.Option(help="Only methods whose names begin so, comma-separated.")] = "",
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write; the plot goes beside it.")] = Path(
        "results/pareto.json"
    ),
) -> None:
    """Measure every method at every share on the same prompts, the pool frozen, fill and measured texts disjoint."""
    setting = Setting.load(model)
    wanted = tuple(filter(None, only.split(",")))
    chosen = {n: m for n, m in points().items() if n in ("dense", "exact") or not wanted or n.startswith(wanted)}
    rows: dict[tuple[str, str], list[Row]] = {}
    with Progress(console=stderr_console()) as progress:
        for task in tasks.split(","):
            for topology in topologies.split(","):
                trial = Trial(topology, 5, prompts, fill_prompts, prompt_tokens, answer_tokens, 1, seed, "generate")
                bench = trial.prepare(setting, make_task(task).problems(), chosen)
                found = bench.run(progress, f"{task}, {topology}")
                rows[task, topology] = [row for row in found if row["agent"] != bench.first_agent]
    everything = [row for kind in rows.values() for row in kind]
    result = {
        **setting.describe(),
        "seed": seed,
        "command": command_line("pareto"),
        "points": summarise(everything, chosen),
        "by_text": {
            task: summarise([row for (name, _), kind in rows.items() if name == task for row in kind], chosen)
            for task in dict.fromkeys(name for name, _ in rows)
        },
        "yardstick": closeness([row for row in everything if row["method"] == "yardstick"]),
    }
    write_json(out, result)
    draw(result, out.with_suffix(".svg"))
    for point in sorted(result["points"], key=lambda p: p["recompute"]):
        print(
            f"{point['method']:26} recompute {point['recompute']:6.1%}  reuse {point['reuse']:6.1%}  "
            f"KL {point['mean_kl']:.4f}  first {point['first_kl']:.4f}  top-1 {point['top1']:.3f}  "
            f"TTFT {point['ttft_s']:.3f} s  n {point['n']}"
        )


def summarise(rows: Sequence[Row], chosen: Mapping[str, Method]) -> list[dict[str, Any]]:
    """A point for each method: means over prompts, medians of seconds."""
    dense = median(t for row in rows if row["method"] == "dense" for t in row["ttft_s"])
    found = []
    for name in chosen:
        mine = [row for row in rows if row["method"] == name]
        if name in ("dense", "exact") or not mine:
            continue
        found.append(
            {
                "method": name,
                "recompute": 1.0 - fmean(row["reuse"] for row in mine),
                "reuse": fmean(row["reuse"] for row in mine),
                **closeness(mine),
                "ttft_s": median(t for row in mine for t in row["ttft_s"]),
                "dense_ttft_s": dense,
                "n": len(mine),
            }
        )
    return found
