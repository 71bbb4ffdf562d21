"""Adds one result to a JSON file of results."""

from __future__ import annotations

import json
import platform
from pathlib import Path


def record(path: Path, name: str, command: str, found: dict[str, object]) -> None:
    """Set ``name`` in the file at ``path`` to the result and the command that made it, and print it."""
    held = json.loads(path.read_text()) if path.exists() else {}
    held[name] = {"command": command, "python": platform.python_version(), **found}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    print(json.dumps({name: held[name]}, indent=1))
