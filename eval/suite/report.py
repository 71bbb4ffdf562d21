"""``python -m eval report FILE.json``: the page and the summary of a results file, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eval.files.output import beside, require_different, write_json, write_text
from eval.suite.doc import write_doc
from eval.suite.files import read_suite
from eval.suite.markdown import markdown
from eval.suite.metrics import figures, summary
from eval.suite.page import suite_page
from kvcomm.errors import InvalidInput

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


PAGE_AND_SUMMARY = (".html", ".md")


def write_report(results: Path) -> tuple[Path, ...]:
    """Write the page and the summary of ``results`` beside it and return their paths.

    Raises:
        InvalidInput: it is not a results file of the suite, or as ``beside`` and ``require_different``.
    """
    page, summary = beside(results, *PAGE_AND_SUMMARY)
    require_different(results=results, page=page, summary=summary)
    result = read_suite(results)
    write_text(page, suite_page(result))
    write_text(summary, markdown(result))
    return page, summary


def figures_again(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its figures taken from its rows by this version's statistics.

    Raises:
        InvalidInput: rows lack what a figure is made of.
    """
    cells = []
    for cell in result["cells"]:
        try:
            cells.append(cell | {"methods": figures(cell["rows"], list(cell["methods"]), cell["first"])})
        except (KeyError, TypeError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise InvalidInput(
                f"figures of {cell['name']} cannot be made of its rows ({wrong}); measure again"
            ) from None
    return result | summary(cells)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A results file of `eval run`.")],
    again: Annotated[
        bool, typer.Option(help="Take the figures from the file's rows again first, by this version's statistics.")
    ] = False,
    doc: Annotated[
        Path | None, typer.Option(help="A document to write too, docs/results.md say; its plots go beside it.")
    ] = None,
) -> None:
    """Write the HTML page and the Markdown summary of a results file beside it, and a document with plots."""
    if doc is not None:
        page, summary_path = beside(results, *PAGE_AND_SUMMARY)
        require_different(results=results, page=page, summary=summary_path, doc=doc)
    if again:
        write_json(results, figures_again(read_suite(results)))
    for path in write_report(results):
        typer.echo(str(path))
    if doc is not None:
        for path in write_doc(read_suite(results), results, doc):
            typer.echo(str(path))
