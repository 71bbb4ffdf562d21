"""``python -m eval ablations``: what each part of the method is worth, one part changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.files.output import command_line, require_writable, write_json
from eval.methods.registry import ISOLATED, METHODS, Method
from eval.running.jobs import JobsOption
from eval.running.setting import Setting
from eval.studies.sweep import print_points, sweep
from eval.trial import Trial
from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.offset import LinearOffset, MeanOffset, OffsetEstimator
from kvcomm.anchors.softmax import SoftmaxBook
from kvcomm.anchors.statistics import Pair
from kvcomm.reuse.policy import Balanced, Fast, Reuse
from kvcomm.reuse.select import Leading
from kvcomm.types import ModelFingerprint

app = typer.Typer(help="What each part of the method is worth.", add_completion=False, pretty_exceptions_enable=False)


class Ungated(OffsetBook):
    """A book that applies every estimate as it is, however its predictions fared."""

    def _factor(self, pair: Pair) -> torch.Tensor | None:
        return torch.ones(self.statistics.layers, 2)


def _estimating(estimator: OffsetEstimator) -> Callable[[ModelFingerprint], OffsetBook]:
    return partial(OffsetBook, estimator=estimator)


def ablations() -> dict[str, Method]:
    """The methods by name. Nothing is recomputed in them unless their name says so: offsets show best alone."""
    nothing = Leading(0)
    found = {name: METHODS[name] for name in ("dense", "exact", "rerotate", "kvcomm-fast", "kvcomm")}
    found["ablation-no-offsets"] = Method(Reuse(offsets=False, select=nothing), "captured bases as they are")
    found["ablation-no-offsets-predicted"] = Method(
        Reuse(offsets=False, select=Balanced().select),
        "captured bases as they are, as many tokens recomputed as in kvcomm",
    )
    estimators: dict[str, tuple[OffsetEstimator, str]] = {
        "mean": (MeanOffset(), "the running mean of the pair and bucket"),
        "ridge-0.003": (LinearOffset(ridge=0.003), "linear, a tenth of the ridge"),
        "ridge-0.3": (LinearOffset(ridge=0.3), "linear, ten times the ridge"),
        "own-pair": (LinearOffset(prior_calls=0.01), "linear, a pair's own mean from the first call on"),
        "all-pairs": (LinearOffset(prior_calls=1e6), "linear, one mean over all pairs"),
    }
    for name, (estimator, about) in estimators.items():
        found[f"ablation-{name}"] = Method(Fast(), about, book=_estimating(estimator))
    found["ablation-softmax"] = Method(Fast(), "softmax over anchors by token embedding", book=SoftmaxBook)
    found["ablation-ungated"] = Method(Fast(), "linear, whatever its predictions were worth", book=Ungated)
    isolated = Reuse(origins=ISOLATED, offsets=False, select=nothing)
    for name, prefix in {"nothing": "", "newline": "\n", "sentence": "The following text may be of use.\n"}.items():
        found[f"ablation-behind-{name}"] = Method(isolated, f"isolated bases behind {prefix!r}", True, behind=prefix)
    return found


@app.command()
def run(
    tasks: Annotated[str, typer.Option(help="Kinds of text, comma-separated.")] = "humaneval,documents,tools",
    topologies: Annotated[str, typer.Option(help="Comma-separated.")] = "full",
    agents: Annotated[int, typer.Option(help="Agents, the one included that hears nobody.")] = 5,
    prompts: Annotated[int, typer.Option(help="Problems to measure for each task and topology.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    jobs: JobsOption = 1,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/ablations.json"),
) -> None:
    """Measure the method with one part changed at a time, all learning from the same observations."""
    require_writable(out)
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
        ablations(),
        out,
        jobs=jobs,
        **trial,
    )
    write_json(out, {"command": command_line("ablations")} | result)
    print_points(result)
