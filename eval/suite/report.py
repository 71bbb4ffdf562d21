"""``python -m eval report FILE.json``: the page and the summary of a results file, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.output import write_text
from eval.suite.doc import write_doc
from eval.suite.files import read_suite
from eval.suite.markdown import markdown
from eval.suite.page import suite_page

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def write_report(results: Path) -> tuple[Path, Path]:
    """Write the page and the summary of ``results`` beside it and return their paths.

    Raises:
        InvalidInput: it is not a results file of the suite.
    """
    result = read_suite(results)
    page, summary = results.with_suffix(".html"), results.with_suffix(".md")
    write_text(page, suite_page(result))
    write_text(summary, markdown(result))
    return page, summary


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A results file of `eval run --preset`.")],
    doc: Annotated[
        Path | None, typer.Option(help="A document to write too, docs/results.md say; its plots go beside it.")
    ] = None,
) -> None:
    """Write the HTML page and the Markdown summary of a results file beside it, and a document with plots."""
    for path in write_report(results):
        typer.echo(str(path))
    if doc is not None:
        for path in write_doc(read_suite(results), results, doc):
            typer.echo(str(path))
