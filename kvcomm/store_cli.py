"""``kvcomm store``: look into a folder of entries, check it, clear it up, remove from it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from kvcomm.store import DiskStore, Listing

T = TypeVar("T")

app = typer.Typer(help="Look into, check and clear a folder of stored KV.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The store's folder.", exists=True, file_okay=False)]
KeyFile = Annotated[
    Path | None, typer.Option(help="File of the 32-byte master secret of a sealed store.", exists=True, dir_okay=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Space = Annotated[str | None, typer.Option(help="Only this namespace.")]


@app.command()
def ls(folder: Folder, namespace: Space = None, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """List what is held and how it was computed, without reading payloads."""
    from kvcomm.types import Namespace

    with _opened(folder, key_file) as store:
        rows = [_row(e) for e in store.entries(None if namespace is None else Namespace(namespace))]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{len(rows)} entries")
    told = ""
    for row in sorted(rows, key=lambda row: (str(row["namespace"]), str(row["fingerprint"]))):
        where = f"namespace {row['namespace']}, model {str(row['fingerprint'])[:12]}"
        if where != told:
            print(f"\n{where}\n  {'content':12} {'tokens':>6} {'MiB':>8}  computed")
            told = where
        print(f"  {str(row['content'])[:12]} {row['tokens']:>6} {int(str(row['bytes'])) / 2**20:>8.2f}  {_said(row)}")


@app.command()
def stats(folder: Folder, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Entries and bytes of each namespace."""
    with _opened(folder, key_file) as store:
        usage = {n: {"entries": u.entries, "bytes": u.nbytes} for n, u in sorted(store.usage().items())}
    if as_json:
        print(json.dumps(usage, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("namespace", "entries", "MiB")
    for name, used in usage.items():
        table.add_row(name, str(used["entries"]), f"{used['bytes'] / 2**20:.2f}")
    Console().print(table)


@app.command()
def verify(folder: Folder, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Read and check every byte; set aside what is bad. Ends with status 1 if anything was."""
    bad: list[dict[str, str]] = []
    checked = 0
    with _opened(folder, key_file) as store:
        for path, _, _, error in _progress(store.upkeep.verify(), store.upkeep.count(), "verifying", as_json):
            checked += 1
            if error is not None:
                bad.append({"file": str(path), "error": str(error)})
    if as_json:
        print(json.dumps({"checked": checked, "bad": bad}, indent=1))
    else:
        print(f"{checked} checked, {len(bad)} bad")
        for item in bad:
            print(f"{item['file']}: {item['error']}")
    raise typer.Exit(1 if bad else 0)


@app.command()
def gc(
    folder: Folder, key_file: KeyFile = None, as_json: AsJson = False,
    max_bytes: Annotated[int | None, typer.Option(help="Evict until no more bytes than this are held.", min=1)] = None,
    max_entries: Annotated[int | None, typer.Option(help="Evict until no more entries are held.", min=1)] = None,
) -> None:  # fmt: skip
    """Remove what expired, what crashes left over and what was set aside; optionally evict down to a size."""
    from kvcomm.store.eviction import UNLIMITED, Quota

    with _opened(folder, key_file) as store:
        found = {"expired": store.expire(), **store.sweep()}
        found["evicted"] = store.shrink(Quota(max_bytes or UNLIMITED, max_entries or UNLIMITED))
    text = ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in found.items())
    print(json.dumps(found, indent=1) if as_json else text)


@app.command()
def rm(
    folder: Folder, namespace: Annotated[str, typer.Option(help="The namespace to remove from.")],
    group: Annotated[str | None, typer.Option(help="Only this group: a tool and version, or a session.")] = None,
    content: Annotated[str | None, typer.Option(help="Only contents whose digest starts with this.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Remove a namespace, or a group or contents in it."""
    from kvcomm.types import Namespace

    what = f"group {group!r}" if group is not None else f"contents {content}…" if content else "everything"
    if not yes:
        typer.confirm(f"Remove {what} in namespace {namespace!r} from {folder}?", abort=True, err=True)
    space = Namespace(namespace)
    with _opened(folder, key_file) as store:
        if content:
            chosen = [e for e in store.entries(space) if e.key.content.startswith(content)]
            removed = sum(store.delete(e.key) for e in chosen if group is None or e.attributes.group == group)
        elif group is not None:
            removed = store.delete_group(space, group)
        else:
            removed = store.delete_namespace(space)
    print(json.dumps({"removed": removed}) if as_json else f"{removed} removed")


@contextmanager
def _opened(folder: Path, key_file: Path | None) -> Iterator[DiskStore]:
    from kvcomm.errors import KVCommError
    from kvcomm.store import DiskStore, Keyring

    try:
        if not (folder / "store.json").is_file():
            raise typer.BadParameter(f"{folder} holds no store: it has no store.json")
        with DiskStore(folder, keyring=None if key_file is None else Keyring(key_file.read_bytes())) as store:
            yield store
    except KVCommError as error:
        print(f"kvcomm store: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def _progress(items: Iterator[T], total: int, what: str, quiet: bool) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, what, total, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()))


def _said(row: dict[str, object]) -> str:
    """How an entry was computed, and what is unusual about how it is kept; last in its line, of any length."""
    words = [str(row["origin"]), str(row["context"]), "exact" if row["exact"] else ""]
    words += [f"({row['priority']})".lower()] if row["priority"] != "HISTORY" else []
    words += [f"group {row['group']}"] if row["group"] else []
    words += [str(row["encoding"])] if row["encoding"] != "raw" else []
    if row["expires_s"] is not None:
        words.append(f"ends in {float(str(row['expires_s'])) - time.time():.0f} s")
    return "".join(c if c.isprintable() else "?" for c in " ".join(filter(None, words)))


def _row(entry: Listing) -> dict[str, object]:
    key = entry.key
    return {
        "namespace": key.namespace.name, "fingerprint": key.fingerprint.digest, "content": key.content,
        "origin": key.recipe.origin, "context": key.recipe.context, "preceding": key.recipe.preceding,
        "exact": key.recipe.exact, "tokens": entry.tokens, "bytes": entry.nbytes, "encoding": entry.encoding,
        "priority": entry.attributes.priority.name, "group": entry.attributes.group, "created_s": entry.created_s,
        "expires_s": entry.expires_s,
    }  # fmt: skip
