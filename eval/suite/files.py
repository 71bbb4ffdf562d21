"""Results files of the suite, read with what is wrong named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcomm.errors import InvalidInput

KIND = "kvcomm evaluation suite"
_NEEDED = ("model", "model_digest", "threads", "versions", "machine", "preset", "command", "cells", "pooled", "failed")
_CELL = ("name", "task", "topology", "calls", "agents", "first", "trial", "about", "yardstick", "methods", "rows")


def read_suite(path: Path) -> dict[str, Any]:
    """A results file of ``eval run --preset``.

    Raises:
        InvalidInput: it cannot be read, is something else, or a row has a number that is not finite.
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
    for cell in result["cells"]:
        for row in cell["rows"]:
            for column, value in _numbers(row):
                if not math.isfinite(value):
                    where = f"cell {cell['name']}, method {row.get('method')}, case {row.get('case')}"
                    raise InvalidInput(f"{path}: {where}: {column} is {value}; measure this cell again")
    return result


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for column, value in row.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from ((column, one) for one in inner if isinstance(one, float))
