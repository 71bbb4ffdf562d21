"""Results files to pages: ``python -m eval page results/demo.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.demo.page import demo_page
from eval.demo.result import read_demo
from eval.files.output import beside, require_different, write_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def write_page(results: Path, page: Path | None = None) -> Path:
    """Write the page of a results file, beside it if ``page`` is not given, and return its path.

    Raises:
        InvalidInput: the results file cannot be read, or would be replaced by the page.
    """
    page = page or beside(results, ".html")[0]
    require_different(results=results, page=page)
    write_text(page, demo_page(read_demo(results)))
    return page


@app.command()
def main(
    results: Annotated[Path, typer.Argument(help="A results file, for example results/demo.json.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; beside the results if not given.")] = None,
) -> None:
    """Make the HTML page of a results file."""
    typer.echo(str(write_page(results, out)))
