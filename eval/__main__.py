"""``python -m eval …``. Each command imports what it needs when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

from eval.pages.markdown_text import line
from kvcomm.errors import KVCommError

app = typer.Typer(
    name="eval", help="Measure kvcomm.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
ModelOption = Annotated[str | None, typer.Option("--model", help="HuggingFace id or local folder.")]


@app.callback()
def _root() -> None:
    """Measure kvcomm: time to first token, reuse and closeness to a full prefill."""


@app.command()
def model(model: ModelOption = None) -> None:
    """Fetch the default model if needed and print its folder as the last line."""
    from eval.models.default import resolve

    typer.echo(resolve(model))


def _mount(name: str, module: str, summary: str) -> None:
    """Add ``module.app`` as a sub-command that is imported only when it is called."""

    @app.command(
        name,
        help=summary,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def command(context: typer.Context) -> None:
        importlib.import_module(module).app(args=context.args, prog_name=f"python -m eval {name}")


_mount("run", "eval.run", "Measure a preset (quick, standard, paper, paper-smoke), or compare methods on a task.")
_mount("tools-story", "eval.studies.tools_story", "Hit rate and TTFT when the catalogue of tools changes.")
_mount("tail", "eval.studies.tail", "Tail of TTFT with two conversations at once.")
_mount("peers", "eval.peers.command", "Other programs that reuse KV, each against its own dense runs.")
_mount("report", "eval.suite.report", "Make the page and the summary of a preset's results file.")
_mount("plan", "eval.suite.plan", "Whether a preset can be built, and how long it takes.")
_mount("compare", "eval.suite.compare", "Say what became better or worse between two results files.")
_mount("demo", "eval.demo.command", "Five agents that share KV, and a page about it.")
_mount("pareto", "eval.studies.pareto", "Closeness against recompute, for every method.")
_mount("ablations", "eval.studies.ablations", "What each part of the method is worth.")
_mount("learning", "eval.studies.learning", "Closeness against the number of calls that were learned from.")
_mount("offsets", "eval.studies.offset_study", "How much of the true offsets each estimator explains.")
_mount("near", "eval.studies.near", "Closeness of nearly equal texts.")
_mount("verified", "eval.studies.verified", "Verified answers against dense ones, and what healing is worth.")
_mount("trust", "eval.studies.trust", "Predicted against measured closeness.")
_mount(
    "gate",
    "eval.studies.gate",
    "The cost gate over prompt lengths: when it reuses, and what is lost where it does not.",
)
_mount("train-small", "eval.models.train_small", "Train a small model of another family.")
_mount("page", "eval.demo.report", "Make the HTML page again from a results file.")


def main() -> None:
    """Run the command line; errors raised on purpose become one line and exit status 1."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar of loaded weights, in a log
    try:
        app()
    except KVCommError as error:
        print(f"error: {line(str(error))}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
