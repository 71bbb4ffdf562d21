"""What a command writes: figures as JSON, and the command that repeats them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcomm.errors import InvalidInput


def command_line(name: str) -> str:
    """The command that was given, as it can be typed again."""
    given = sys.argv[1:]
    return shlex.join(["python", "-m", "eval", name, *(given[1:] if given[:1] == [name] else [])])


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write ``result``, its folder made if needed; figures are numbers, never null or NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def fill_table(doc: Path, name: str, table: str) -> None:
    """Put ``table`` between ``<!-- name -->`` and ``<!-- end of name -->`` in a document.

    Raises:
        InvalidInput: the document has not both marks once.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    text = doc.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise InvalidInput(f"{doc} must have one line {begin.strip()} and behind it one {end}; add them")
    head, rest = text.split(begin)
    doc.write_text(f"{head}{begin}{table}\n{end}{rest.split(end)[1]}", encoding="utf-8")
