"""Parts of a long run that are done, kept in a file beside its output until all are: a run that is cut off goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.files.hold import hold, release
from eval.files.output import NotWritten
from eval.files.progress import stderr_console
from eval.files.reading import strict_json
from kvcomm.types import digest_fields


class Finished:
    """Finished parts by what they are of. The file is this process's alone until ``clear`` or the process's end.

    Args:
        path: a JSON object a line; removed again where nothing was added.
        about: everything that a part's figures depend on but its own name: settings, methods, model, versions,
            machine. A part kept under anything else is never taken.

    Raises:
        InvalidInput: another run uses the file, or it cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._about = digest_fields(json.dumps(about, sort_keys=True, default=str).encode())
        self._parts: dict[str, Any] = {}
        hold(path)
        skipped = 0
        with path.open("rb") as lines:
            for line in lines:
                kept = _kept(line)
                if kept is None:
                    skipped += 1
                elif kept["about"] == self._about:
                    self._parts[kept["name"]] = kept["part"]
        if skipped:
            said = f"{path}: skipped {skipped} of its lines, cut off or not a part; they are measured again"
            stderr_console().print(said, highlight=False, markup=False)

    def get(self, name: str) -> Any | None:
        """The part of that name, or None while it is not done."""
        return self._parts.get(name)

    def add(self, name: str, part: Any) -> None:
        """Keep a part.

        Raises:
            NotWritten: a number in it is not finite, or the disk is full.
        """
        try:
            line = json.dumps({"about": self._about, "name": name, "part": part}, allow_nan=False)
        except ValueError as error:
            raise NotWritten(
                f"part {name!r} was not kept: a figure is not finite ({error}); measure it again"
            ) from None
        try:
            hold(self.path)
            with self.path.open("ab+") as file:
                file.write(_line_end(file) + line.encode() + b"\n")
        except OSError as error:
            raise NotWritten(
                f"part {name!r} was not kept in {self.path} ({error.strerror}); make room and give the command again"
            ) from None
        self._parts[name] = part

    def clear(self) -> None:
        """All is done: drop the file."""
        self.path.unlink(missing_ok=True)
        release(self.path)


def _kept(line: bytes) -> dict[str, Any] | None:
    """What a line holds, or None where it is no part: cut off, or written by something else."""
    try:
        kept = strict_json(line)
    except ValueError:
        return None
    named = isinstance(kept, dict) and isinstance(kept.get("about"), str) and isinstance(kept.get("name"), str)
    return kept if named and "part" in kept else None


def _line_end(file: Any) -> bytes:
    """A line's end, where the last line lacks it because it was cut off."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"
