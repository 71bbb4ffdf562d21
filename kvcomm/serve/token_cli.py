"""``kvcomm anchors token``: make, list and revoke the service's tokens."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvcomm.serve.audit import AuditLog
    from kvcomm.serve.tokens import TokenFile

app = typer.Typer(help="Make, list and revoke tokens of the anchor service.", no_args_is_help=True)

TOKENS_NAME, AUDIT_NAME = "tokens.sqlite", "audit.jsonl"
Folder = Annotated[Path, typer.Argument(help="The service's folder.", file_okay=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


@app.command()
def create(
    folder: Folder,
    namespace: Annotated[str, typer.Option(help="The only namespace that the token sees.")],
    right: Annotated[list[str], typer.Option(help="read, write or admin; repeat it for several.")],
    expires: Annotated[str | None, typer.Option(help="Lifetime: 90m, 12h or 30d; none without it.")] = None,
    note: Annotated[str, typer.Option(help="What it is for, up to 80 characters.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write it into this new file, 0600, instead of printing.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is shown once; the folder keeps its hash only."""
    from kvcomm.transfer.auth import check_rights
    from kvcomm.types import Namespace

    with _opened(folder, make=True) as (tokens, audit):
        space, rights, lifetime_s = Namespace(namespace), check_rights(right), _seconds(expires)
        fd = None if out is None else os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        token = tokens.create(space, rights, lifetime_s=lifetime_s, note=note)
        try:
            audit.write("token_create", "local", namespace, token=token.identity, rights=",".join(sorted(rights)))
        except BaseException:
            tokens.revoke(token.identity)
            raise
        if fd is not None:
            with open(fd, "w", encoding="ascii") as file:
                file.write(token.reveal() + "\n")
    shown = {"token": token.reveal()} if out is None else {"file": str(out)}
    if as_json:
        print(json.dumps({"id": token.identity, "namespace": namespace, "rights": sorted(rights), **shown}))
        return
    print(next(iter(shown.values())))
    print(f"token {token.identity}, namespace {namespace}, rights: {', '.join(sorted(rights))}", file=sys.stderr)


@app.command("list")
def list_(
    folder: Folder,
    namespace: Annotated[str | None, typer.Option(help="Only this namespace.")] = None,
    as_json: AsJson = False,
) -> None:
    """List tokens by id; secrets are not held."""
    from kvcomm.types import Namespace

    now = time.time()
    with _opened(folder) as (tokens, _):
        found = tokens.tokens(None if namespace is None else Namespace(namespace))
    rows = [
        {
            "id": t.identity, "state": t.state(now), "rights": sorted(t.rights), "namespace": t.namespace,
            "note": t.note, "created_s": t.created_s, "expires_s": t.expires_s, "revoked_s": t.revoked_s,
        }
        for t in found
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{len(rows)} tokens", box=None, title_justify="left")
    for name, least in (("id", 16), ("state", 7), ("rights", 6), ("ends", 10), ("namespace", 9), ("note", 4)):
        table.add_column(name, min_width=least, overflow="fold", no_wrap=least in (16, 7, 10))
    for token in found:
        ends = "never" if token.expires_s is None else time.strftime("%Y-%m-%d", time.gmtime(token.expires_s))
        cells = (token.identity, token.state(now), " ".join(sorted(token.rights)), ends, token.namespace, token.note)
        table.add_row(*map(Text, cells))  # Text, so that a note is not read as markup
    Console().print(table)


@app.command()
def revoke(folder: Folder, identity: Annotated[str, typer.Argument(help="The token's id.")]) -> None:
    """End a token at once. Ends with status 1 if no such token was active."""
    with _opened(folder) as (tokens, audit):
        if not re.fullmatch(r"[0-9a-f]{16}", identity):
            raise typer.BadParameter("a token's id is 16 hex digits; `list` shows them (give no secret here)")
        audit.write("token_revoke", "local", token=identity)
        done = tokens.revoke(identity)
    print(f"token {identity} {'revoked' if done else 'was not active'}")
    raise typer.Exit(0 if done else 1)


@app.command()
def purge(folder: Folder) -> None:
    """Drop revoked and expired tokens from the list."""
    with _opened(folder) as (tokens, audit):
        audit.write("token_purge", "local")
        print(f"{tokens.purge()} dropped")


@contextmanager
def _opened(folder: Path, make: bool = False) -> Iterator[tuple[TokenFile, AuditLog]]:
    from kvcomm.errors import KVCommError
    from kvcomm.serve.audit import AuditLog
    from kvcomm.serve.tokens import TokenFile

    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TokenFile(folder / TOKENS_NAME, create=make) as tokens:
            yield tokens, AuditLog(folder / AUDIT_NAME)
    except (KVCommError, OSError) as error:
        print(f"kvcomm anchors token: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if found is None:
        raise typer.BadParameter(f"{text[:20]!r} is no lifetime; write 90m, 12h or 30d")
    return int(found[1]) * _UNITS[found[2]]
