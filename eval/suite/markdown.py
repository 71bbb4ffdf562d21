"""The summary for a pull request: what matters, in a table that a review shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.suite.brief import overview
from eval.suite.words import BRIEF, columns_of, facts_of, figure


def markdown(result: Mapping[str, Any]) -> str:
    """A results file as Markdown; each figure with its 95 % interval and the number of prompts."""
    lines = [f"## kvcomm, preset {result['preset']}", ""]
    first = overview(result)
    if first is not None:
        lines += [f"{first.name[0].upper()}{first.name[1:]}.", "", *_table(first.methods), ""]
    for cell in (cell for cell in result["cells"] if first is None or first.pooled or cell is not first.cells[0]):
        lines += ["<details>", f"<summary>{cell['name']}</summary>", "", *_table(cell["methods"]), "", "</details>", ""]
    lines += [f"- {failure['cell']} failed: {failure['error']}" for failure in result["failed"]]
    lines += [f"- {name}: {value}" for name, value in facts_of(result)]
    return "\n".join([*lines, "", f"`{result['command']}`", ""])


def _table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = columns_of(methods, BRIEF)
    head = ["method", *(column.heading for column in columns)]
    rows = [
        [name, *(figure(found[c.key], c.show) if c.key in found else "" for c in columns)]
        for name, found in methods.items()
    ]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
