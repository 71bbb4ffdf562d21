"""The summary for a pull request: what matters, in a table that a review shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.files.output import markdown_table
from eval.pages.markdown_text import code, plain
from eval.suite.brief import overview
from eval.suite.words import BRIEF, columns_of, facts_of, figure


def markdown(result: Mapping[str, Any]) -> str:
    """A results file as Markdown; each figure with its 95 % interval and the number of prompts."""
    lines = [f"## kvcomm, {plain(result['preset'])}", ""]
    first = overview(result)
    if first is not None:
        lines += [f"{plain(first.name[0].upper() + first.name[1:])}.", "", *_table(first.methods), ""]
    for cell in (cell for cell in result["cells"] if first is None or first.pooled or cell is not first.cells[0]):
        shown = _table(cell["methods"])
        lines += ["<details>", f"<summary>{plain(cell['name'])}</summary>", "", *shown, "", "</details>", ""]
    lines += [plain(f"- {failure['cell']} failed: {failure['error']}") for failure in result["failed"]]
    lines += [plain(f"- {name}: {value}") for name, value in facts_of(result)]
    return "\n".join([*lines, "", code(result["command"]), ""])


def _table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = columns_of(methods, BRIEF)
    head = ["method", *(column.heading for column in columns)]
    rows = [
        [name, *(figure(found[c.key], c.show) if c.key in found else "" for c in columns)]
        for name, found in methods.items()
    ]
    return [markdown_table(head, rows)]
