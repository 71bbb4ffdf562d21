"""What a command writes: figures as JSON, and the command that repeats them. A file is written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

from eval.pages.markdown_text import cell
from kvcomm.errors import InvalidInput, KVCommError


class NotWritten(KVCommError):
    """A result could not be written; a file that was there before is as it was."""


def command_line(name: str) -> str:
    """The command that was given, as it can be typed again."""
    given = sys.argv[1:]
    return shlex.join(["python", "-m", "eval", name, *(given[1:] if given[:1] == [name] else [])])


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write ``result`` as ``write_text`` does; figures are numbers, never null or NaN.

    Raises:
        NotWritten: as write_text, and where a figure is not finite.
        InvalidInput: as write_text.
    """
    try:
        text = json.dumps(result, indent=1, allow_nan=False)
    except ValueError as error:
        raise NotWritten(f"{path} was not written: a figure is not finite ({error}); measure again") from None
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text``, its folder made if needed: into a file beside it first, which takes its place once it is whole.

    Raises:
        NotWritten: the disk is full, or the file may not be written; what was there before is as it was.
        InvalidInput: a folder, or anything else that is no file, is there.
    """
    temporary = None
    try:
        target = _target(path)
        temporary = target.with_name(f".writing-{secrets.token_hex(8)}")
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise NotWritten(
            f"{path} was not written ({error.strerror}); make room, or choose a path that can be written"
        ) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as SVG, as ``write_text`` does."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_text(path, drawn.getvalue())


def beside(path: Path, *endings: str) -> tuple[Path, ...]:
    """The files with these endings that go beside a results file.

    Raises:
        InvalidInput: ``path`` names no file, or has one of the endings, so that it would be replaced.
    """
    if not path.name:
        raise InvalidInput(f"{str(path)!r} is no file's name; give the path of a file")
    if path.suffix in endings:
        raise InvalidInput(f"{path} would be replaced by the {path.suffix} file beside it; give it the ending .json")
    return tuple(path.with_suffix(ending) for ending in endings)


def require_writable(path: Path, *endings: str) -> tuple[Path, ...]:
    """Make sure, before anything is measured, that ``path`` and what goes beside it can be written.

    Folders are made, files are not.

    Returns:
        The files ``beside`` it.

    Raises:
        InvalidInput: one of them cannot be written, or as ``beside``.
    """
    others = beside(path, *endings)
    for one in (path, *others):
        _require_writable(one)
    return others


def require_different(**files: Path) -> None:
    """Make sure that no file would be written over another; the names say in an error which they are.

    Raises:
        InvalidInput: two are the same file, links of both kinds followed.
    """
    for (name, path), (other, place) in combinations(files.items(), 2):
        if os.path.realpath(path) == os.path.realpath(place) or (
            path.exists() and place.exists() and path.samefile(place)
        ):
            raise InvalidInput(f"{place} is the same file for {other} as for {name}; give another path")


def _require_writable(path: Path) -> None:
    try:
        probe = _target(path).with_name(f".writing-{secrets.token_hex(8)}")
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written ({error.strerror}); choose another path") from None


def _target(path: Path) -> Path:
    """The file that is to be replaced, links followed, its folder made.

    Raises:
        InvalidInput: something else than a file is there.
        OSError: the folder cannot be made, or the file that is there may not be written.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise InvalidInput(f"{path} is {what}; give the path of a file to write")
    if not os.access(target, os.W_OK):
        raise PermissionError(0, "it is write-protected")
    return target


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing in a cell can end it or be HTML."""
    lines = [[cell(text) for text in head], ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
