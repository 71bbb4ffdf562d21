"""What a command writes: figures as JSON, and the command that repeats them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
