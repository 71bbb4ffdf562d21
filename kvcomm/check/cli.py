"""``kvcomm calibrate`` and ``kvcomm check``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from kvcomm.check.report import Report

ModelOption = Annotated[str, typer.Option("--model", help="HuggingFace id or local folder.")]
PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="JSON lines of texts, question and kind; a few shipped ones if absent.")
]
TokensOption = Annotated[int, typer.Option("--answer-tokens", help="Tokens of an answer at most.", min=1)]


def calibrate(
    model: ModelOption,
    prompts: PromptsOption = None,
    answer_tokens: TokensOption = 24,
    out: Annotated[Path | None, typer.Option("--out", help="Write here instead of where engines look.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw the plot into this file.")] = None,
) -> None:
    """Compare dense with reused, and keep how closeness follows from what is known before the first token."""
    from kvcomm.check.calibrating import calibrated
    from kvcomm.check.plot import as_svg, as_text, rank_correlation
    from kvcomm.reuse.calibration import save

    try:
        examples = _examples(prompts)
        found, points = calibrated(model, _engine(model), examples, _say, answer_tokens)
        path = save(found, out)
        if svg is not None:
            svg.write_text(as_svg(points), encoding="utf-8")
    except Exception as error:
        _end(error)
    typer.echo(as_text(points))
    powers = ", ".join(f"{name} {power:.2f}" for name, power in found.to_json()["powers"].items())
    typer.echo(f"{found.samples} runs, rank correlation {rank_correlation(points):.2f}, powers: {powers}")
    typer.echo(f"90 % of measured KL below {found.margin(0.9):.1f} times the predicted\n{path}")


def check(
    model: ModelOption,
    prompts: PromptsOption = None,
    max_kl: Annotated[float, typer.Option("--max-kl", help="Mean KL in nats from a full prefill.")] = 0.05,
    answer_tokens: TokensOption = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page.")] = None,
) -> None:
    """Is reuse safe on this model and these prompts? Ends with 1 where the bound is not kept, with 2 on errors."""
    from kvcomm.check.page import page
    from kvcomm.check.report import check as measured
    from kvcomm.check.report import unsupported

    shown = ""
    try:
        if not (max_kl > 0 and math.isfinite(max_kl)):
            raise InvalidInput(f"max_kl is {max_kl}; give a KL above 0 nats")
        examples = _examples(prompts)
        try:
            report = measured(model, _engine(model), examples, max_kl, _say, answer_tokens)
        except UnsupportedModel as error:
            report = unsupported(model, str(error), max_kl)
        if html is not None:
            html.write_text(page(report), encoding="utf-8")
        if as_json:
            shown = json.dumps(report.to_json(), allow_nan=False)
    except Exception as error:
        if as_json:
            typer.echo(json.dumps(_failed(model, error)))
        _end(error)
    if as_json:
        typer.echo(shown)
    else:
        _print(report)
    raise typer.Exit(0 if report.ok else 1)


def _engine(model: str) -> Any:
    from kvcomm import Engine
    from kvcomm.hf.load import load
    from kvcomm.reuse.policy import Balanced

    return Engine(*load(model), policy=Balanced(gate=False))


def _examples(prompts: Path | None) -> Any:
    from kvcomm.check.prompts import read, shipped

    return shipped() if prompts is None else read(prompts)


_say: Callable[[str], None] = lambda line: typer.echo(line, err=True)  # noqa: E731


def _failed(model: str, error: Exception) -> dict[str, Any]:
    nothing = dict.fromkeys(("supported", "mean_kl", "yardstick_kl", "policy", "ttft_gain"))
    return {"model": model, "ok": False, **nothing, "error": f"{type(error).__name__}: {error}"}


def _end(error: Exception) -> None:
    logging.getLogger(__name__).debug("failed", exc_info=error)
    typer.echo(f"kvcomm: {error}", err=True)
    raise typer.Exit(2) from error


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvcomm.check.plot import as_text
    from kvcomm.check.report import HEADINGS, rows_of

    console = Console()
    console.print(
        f"{report.model}: {'safe' if report.ok else 'not safe'}. {report.reason}", highlight=False, markup=False
    )
    if report.supported:
        table = Table(*HEADINGS)
        for row in rows_of(report):
            table.add_row(*row)
        console.print(table)
        by = ", ".join(f"{kind} {kl:.4f}" for kind, kl in report.by_kind.items())
        console.print(f"mean KL by kind: {by}", highlight=False, markup=False)
        console.print(as_text(report.points), highlight=False, markup=False)
    mark = "calibrated" if report.calibrated else "not calibrated for this model: cautious; run kvcomm calibrate"
    console.print(f"recommended: {report.policy} (predictions {mark})", highlight=False, markup=False)
