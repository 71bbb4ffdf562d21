"""What a results file says in brief: in the terminal, and at the head of the page and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from eval.suite.words import BRIEF, columns_of

Methods = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Overview:
    """What is shown first.

    Attributes:
        name: what the figures are of.
        cells: whose figures they are.
    """

    name: str
    cells: Sequence[Mapping[str, Any]]
    methods: Methods

    @property
    def pooled(self) -> bool:
        """Whether it is of several cells together."""
        return len(self.cells) > 1


def overview(result: Mapping[str, Any]) -> Overview | None:
    """All fully connected cells together where there are several, else the first cell; None where there is none."""
    together = [cell for cell in result["cells"] if cell["topology"] == "full"]
    if result["pooled"] and len(together) > 1:
        return Overview("all fully connected cells", together, result["pooled"])
    return next((Overview(cell["name"], [cell], cell["methods"]) for cell in result["cells"]), None)


def brief_table(shown: Overview) -> Table:
    """A table for the terminal: values alone, the intervals are in the file and on the page."""
    columns = columns_of(shown.methods, BRIEF)
    n = max(found["reuse"]["n"] for found in shown.methods.values())
    table = Table(title=Text(f"{shown.name}; {n:.0f} prompts"), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("method")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for method, found in shown.methods.items():
        table.add_row(
            method, *(column.show(found[column.key]["value"]) if column.key in found else "" for column in columns)
        )
    return table
