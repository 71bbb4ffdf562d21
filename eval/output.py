"""What a command writes: figures as JSON, and the command that repeats them."""

from __future__ import annotations

import json
import shlex
import sys
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
