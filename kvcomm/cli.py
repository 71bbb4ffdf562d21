"""The ``kvcomm`` command."""

from __future__ import annotations

import typer

from kvcomm.store_cli import app as store_app

app = typer.Typer(help="Reuse the KV cache of any piece of text.", no_args_is_help=True)
app.add_typer(store_app, name="store")


@app.callback()
def main() -> None:
    """Reuse the KV cache of any piece of text."""


if __name__ == "__main__":
    app()
