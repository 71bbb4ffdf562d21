"""``python -m eval trust``: calibrate, then hold predicted against measured closeness on prompts never seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from eval.files.output import command_line, require_different, require_writable, write_json, write_text
from eval.files.progress import stderr_console
from eval.files.reading import read_file
from eval.measure import Conversation, dense_answer, open_case
from eval.methods.registry import METHODS
from eval.running.finished import Finished
from eval.running.setting import Setting
from eval.studies.trust_figures import WATCHED, figures, print_figures
from eval.tasks import make_task
from eval.trial import Trial
from kvcomm import Segment
from kvcomm.check import prompts as check_prompts
from kvcomm.check.calibrating import DEPTHS
from kvcomm.check.plot import as_svg
from kvcomm.check.study import study
from kvcomm.closeness import kl_divergence
from kvcomm.hf.fingerprint import weights_digest
from kvcomm.reuse.calibration import Calibration, fit, save
from kvcomm.reuse.judgement import Features
from kvcomm.reuse.policy import Balanced, Dense, Policy
from kvcomm.types import digest_fields

app = typer.Typer(help="Predicted against measured closeness.", add_completion=False, pretty_exceptions_enable=False)
Row = dict[str, Any]
SHIPPED = Path("kvcomm/reuse/calibrations/smollm2-135m-instruct.json")
SHAPE: Mapping[str, Any] = {
    "topology": "full", "agents": 4, "prompt_tokens": 500, "answer_tokens": 48, "repeats": 1, "fill_by": "prefill",
    "fill_prompts": 5,
}  # fmt: skip


def bounded(max_kl: float) -> dict[str, Policy]:
    """Balanced acting on its predictions, and three depths of recompute that are predicted and do not act."""
    return {"balanced": Balanced(gate=False, max_kl=max_kl)} | {WATCHED + depth: by for depth, by in DEPTHS.items()}


def task_rows(
    setting: Setting, task: str, seed: int, prompts: int, methods: Mapping[str, Policy], by: Calibration | None
) -> Iterator[Row]:
    """A row for each method and each agent that hears others, over the task's measured cases."""
    trial = Trial(prompts=prompts, seed=seed, **SHAPE)
    bench = trial.prepare(setting, make_task(task).problems(), {"dense": METHODS["dense"]})
    if by is not None:
        bench.engine.calibration = by
    for _ in bench.learn():
        pass
    for case in bench.workload.measured:
        talk = Conversation(case, {})
        opened = open_case(bench.engine, bench.workload, talk)
        for node in bench.workload.nodes[1:]:
            slots = talk.slots(node)
            dense = dense_answer(bench.engine, node, slots, bench.workload.answer_tokens)
            for name, policy in methods.items():
                engine = opened.fork(policy=policy, learn=False)
                engine.pool = opened.pool
                logits, plan = engine.agents[node.name].force(Segment(dense.token_ids), **slots)
                kl = float(kl_divergence(torch.cat(dense.output.logits).float(), logits).mean().clamp_min(0))
                yield _row(task, f"{case.problem.id} {node.name}", name, kl, plan.reuse_rate, plan.judgement)
            opened.agents[node.name].force(Segment(dense.token_ids), policy=Dense(), **slots)
            talk.messages[node.name] = dense.segment


def example_rows(
    setting: Setting, path: Path | None, methods: Mapping[str, Policy], by: Calibration | None
) -> Iterator[Row]:
    """The same over the prompts of ``kvcomm check``: the shipped ones, or those of a file behind them."""
    engine = setting.engine(policy=Balanced(gate=False))
    if by is not None:
        engine.calibration = by
    fill, measured = check_prompts.divided(check_prompts.shipped())
    if path is not None:
        measured = check_prompts.read(path)
    for number, row in enumerate(study(engine, fill, measured, methods)):
        yield _row(row.kind, str(number // len(methods)), row.method, row.kl, row.reuse, row.judgement)


def _row(kind: str, case: str, method: str, kl: float, reuse: float, judgement: Any) -> Row:
    judged = {} if judgement is None else {
        "predicted": judgement.kl, "bound": judgement.bound, "added": judgement.added, "passes": judgement.passes,
        "features": asdict(judgement.features),
    }  # fmt: skip
    return {"kind": kind, "case": case, "method": method, "kl": kl, "reuse": reuse, **judged}


def fitted(rows: Iterable[Row], setting: Setting, about: str) -> Calibration:
    """The calibration of judged rows."""
    samples = [(Features(**row["features"]), row["kl"]) for row in rows if "features" in row]
    return fit(samples, weights=(weights_digest(setting.model), setting.digest), dtype="float32", about=about)


@app.command()
def trust(
    fit_tasks: Annotated[str, typer.Option(help="Kinds of text that calibration sees.")] = "humaneval,documents,tools",
    tasks: Annotated[str, typer.Option(help="Kinds measured.")] = "humaneval,documents,tools,maths",
    prompts: Annotated[int, typer.Option(help="Problems to measure for each kind; three prompts each.")] = 5,
    fit_prompts: Annotated[int, typer.Option(help="Problems to calibrate on, for each kind.")] = 3,
    max_kl: Annotated[float, typer.Option(help="The bound in nats.")] = 0.05,
    adversarial: Annotated[Path, typer.Option(help="Adversarial prompts.")] = Path("tests/adversarial.jsonl"),
    calibration: Annotated[
        Path | None, typer.Option(help="Where it goes: the package for the default model, else beside the output.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write; a plot goes beside it.")] = Path("results/trust.json"),
) -> None:
    """Calibrate on some seeds and measure on others; adversarial prompts.

    Parts that are done are kept beside the output until the whole is; a run that was cut off goes on behind them.
    """
    hard_prompts = read_file(adversarial, "a JSONL file of prompts")
    (plot,) = require_writable(out, ".svg")
    if calibration is not None:
        require_writable(calibration)
        require_different(out=out, plot=plot, calibration=calibration)
    setting = Setting.load(model)
    seen = {"shape": dict(SHAPE), "fit_prompts": fit_prompts, "prompts": prompts, "max_kl": max_kl,
            "adversarial": digest_fields(hard_prompts), "policies": repr(bounded(max_kl))}  # fmt: skip
    finished = Finished(out.with_suffix(".parts.jsonl"), {**seen, **setting.describe()})
    with Progress(console=stderr_console()) as progress:

        def part(name: str, rows: Iterator[Row]) -> list[Row]:
            if finished.get(name) is None:
                step = progress.add_task(name, total=None)
                found = []
                for row in rows:
                    found.append(row)
                    progress.update(step, advance=1, description=f"{name}: {len(found)} rows")
                finished.add(name, found)
                progress.update(step, total=len(found), completed=len(found))
            kept: list[Row] = finished.get(name)
            return kept

        fits = part("calibrating on shipped prompts", example_rows(setting, None, DEPTHS, None))
        for task in fit_tasks.split(","):
            fits += part(f"calibrating on {task}", task_rows(setting, task, 101, fit_prompts, DEPTHS, None))
        by = fitted(fits, setting, f"{setting.name}; shipped prompts, {fit_tasks}")
        save(by, calibration or (SHIPPED if model is None else out.with_suffix(".calibration.json")))
        policies = bounded(max_kl)
        rows = []
        for task in tasks.split(","):
            rows += part(f"measuring {task}", task_rows(setting, task, 202, prompts, policies, by))
        hard = part("adversarial", example_rows(setting, adversarial, policies, by))
    result = {
        "command": command_line("trust"),
        **setting.describe(),
        "setting": seen,
        "calibration": by.to_json(),
        "figures": figures(rows, hard, max_kl),
        "rows": rows,
        "adversarial": hard,
    }
    write_json(out, result)
    finished.clear()
    points = [
        (row["predicted"], row["kl"]) for row in rows if row["method"].startswith(WATCHED) and row.get("predicted")
    ]
    write_text(plot, as_svg(points, max_kl))
    print_figures(result["figures"])
