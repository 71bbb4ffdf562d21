"""Results files of the suite, read with what is wrong named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcomm.errors import InvalidInput

KIND = "kvcomm evaluation suite"
_NEEDED = ("model", "model_digest", "threads", "versions", "machine", "preset", "command", "cells", "pooled", "failed")
_CELL = ("name", "task", "topology", "calls", "agents", "first", "trial", "about", "yardstick", "methods", "rows")


def read_suite(path: Path) -> dict[str, Any]:
    """A results file of ``eval run --preset``.

    Raises:
        InvalidInput: it cannot be read, or is something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}); give a results file of `eval run --preset`") from None
    if not isinstance(result, dict) or result.get("kind") != KIND:
        raise InvalidInput(f"{path} is not a results file of `eval run --preset`: its 'kind' is not {KIND!r}")
    missing = [name for name in _NEEDED if name not in result]
    missing += [
        f"cells[{n}].{name}" for n, cell in enumerate(result.get("cells", [])) for name in _CELL if name not in cell
    ]
    if missing:
        raise InvalidInput(f"{path} lacks {', '.join(missing[:5])}; measure again, or take the file of this version")
    return result
