"""The ``kvcomm`` command."""

from __future__ import annotations

import typer

import kvcomm
from kvcomm.check.cli import calibrate, check
from kvcomm.serve.cli import app as anchors_app
from kvcomm.serve.worker_cli import worker
from kvcomm.store_cli import app as store_app

app = typer.Typer(name="kvcomm", help="Reuse KV caches of text at any position.", no_args_is_help=True)
app.add_typer(store_app, name="store")
app.add_typer(anchors_app, name="anchors")
app.command()(calibrate)
app.command()(check)
app.command()(worker)


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


if __name__ == "__main__":
    main()
