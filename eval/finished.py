"""Parts of a long run that are done, kept in a file beside its output until all are: a run that is cut off goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcomm.types import digest_fields


class Finished:
    """Finished parts by what they are of.

    Args:
        path: a JSON object a line; made at the first ``add``.
        about: everything that a part's figures depend on but its own name: settings, methods, model, versions,
            machine. A part kept under anything else is never taken.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._about = digest_fields(json.dumps(about, sort_keys=True, default=str).encode())
        self._parts: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    kept = json.loads(line)
                except json.JSONDecodeError:  # cut off while it was written
                    continue
                if kept["about"] == self._about:
                    self._parts[kept["name"]] = kept["part"]

    def get(self, name: str) -> Any | None:
        """The part of that name, or None while it is not done."""
        return self._parts.get(name)

    def add(self, name: str, part: Any) -> None:
        """Keep a part."""
        self._parts[name] = part
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"about": self._about, "name": name, "part": part}) + "\n")

    def clear(self) -> None:
        """All is done: drop the file."""
        self.path.unlink(missing_ok=True)
