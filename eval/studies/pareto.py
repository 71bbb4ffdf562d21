"""``python -m eval pareto``: closeness against recompute, our methods and all published ones on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eval.files.output import command_line, require_writable, write_json
from eval.methods.oracle import TrueDeviation
from eval.methods.registry import EXPECTED, ISOLATED, METHODS, Method
from eval.running.jobs import JobsOption
from eval.running.setting import Setting
from eval.studies.equal import table
from eval.studies.pareto_plot import draw
from eval.studies.sweep import print_points, sweep
from eval.trial import Trial
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.select import Attended, Deviation, LeadingShare, PredictedError, Product, Selection

app = typer.Typer(
    help="Closeness against recompute, for every method.", add_completion=False, pretty_exceptions_enable=False
)
SHARES = (0.05, 0.10, 0.15, 0.20, 0.30)
"""Shares of the approximate tokens that are recomputed; what choosing costs comes on top."""
FEW_SHARES = (0.05, 0.20)
"""Shares for lines that only show where they run: isolated bases, the oracle, the token's expected error alone."""


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
            captured = Reuse(offsets=False, select=select)
            found[f"{name}-captured@{share:g}"] = Method(captured, f"{name} on captured bases")
            if share in FEW_SHARES:
                isolated = Reuse(origins=ISOLATED, offsets=False, select=select)
                found[f"{name}@{share:g}"] = Method(isolated, f"{name} on isolated bases", isolates=True)
        ours: dict[str, Selection] = {
            "predicted": Product(share, EXPECTED),
            "product": Product(share, (*EXPECTED, Attended())),
        }
        for name, select in ours.items():
            about = {"predicted": "predicted error", "product": "predicted error × attention"}[name]
            found[f"kvcomm-{name}@{share:g}"] = Method(Reuse(select=select), f"offsets, {about}")
            plain = Reuse(offsets=False, select=select)
            found[f"ablation-{name}-no-offsets@{share:g}"] = Method(plain, f"{about}, no offsets")
        if share in FEW_SHARES:
            alone = Method(Reuse(select=PredictedError(share)), "offsets, the token's expected error alone")
            found[f"ablation-token-error@{share:g}"] = alone
            found[f"oracle@{share:g}"] = Method(Reuse(select=TrueDeviation(share)), "offsets, true deviation")
    return found


@app.command()
def pareto(
    tasks: Annotated[str, typer.Option(help="Kinds of text, comma-separated.")] = "humaneval,documents,tools",
    topologies: Annotated[str, typer.Option(help="Comma-separated.")] = "full,chain",
    agents: Annotated[int, typer.Option(help="Agents, the one included that hears nobody.")] = 5,
    prompts: Annotated[int, typer.Option(help="Problems to measure for each task and topology.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    only: Annotated[str, typer.Option(help="Only methods whose names begin so, comma-separated.")] = "",
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    jobs: JobsOption = 1,
    out: Annotated[Path, typer.Option(help="JSON file to write; the plot goes beside it.")] = Path(
        "results/pareto.json"
    ),
) -> None:
    """Measure every method at every share on the same prompts, the pool frozen, fill and measured texts disjoint."""
    wanted = tuple(filter(None, only.split(",")))
    chosen = {n: m for n, m in points().items() if n in ("dense", "exact") or not wanted or n.startswith(wanted)}
    (plot,) = require_writable(out, ".svg")
    trial: dict[str, Any] = {
        "agents": agents, "prompts": prompts, "fill_prompts": fill_prompts, "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens, "repeats": 1, "seed": seed, "fill_by": "generate",
    }  # fmt: skip
    for topology in topologies.split(","):
        Trial(topology, **trial)  # refused before the model is loaded
    result = sweep(
        Setting.load(model),
        tasks.split(","),
        topologies.split(","),
        chosen,
        out,
        jobs=jobs,
        **trial,
    )
    result["equal_recompute"] = {"all": table(result["points"])} | {t: table(p) for t, p in result["by_text"].items()}
    write_json(out, {"command": command_line("pareto")} | result)
    draw(result, plot)
    print_points(result)
