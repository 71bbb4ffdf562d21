"""The ``kvcomm`` command. Sub-commands with dependencies of their own are imported when they are called."""

from __future__ import annotations

import typer

import kvcomm

app = typer.Typer(name="kvcomm", help="Reuse KV caches of text at any position.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Reuse KV caches of text at any position."""


@app.command()
def version() -> None:
    """Print the version and stop."""
    typer.echo(kvcomm.__version__)


def main() -> None:
    """Entry point of the console script."""
    app()
