"""The demo's table in the terminal, filled in while it runs, with a progress bar below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eval.demo.result import Tokens
from eval.pages.quantities import nats, percent, times

LOG_EVERY_S = 10.0
_NOT_YET = "·"
_SPEEDUP = "speed-\nup"
_HEADINGS = (
    "prompt\ntokens", "TTFT, s\ndense", "\nexact", "\nreused", _SPEEDUP, "exact/appr/\nrecomp/new", "first\ntoken",
    "mean\nKL", "top-1",
)  # fmt: skip


class Cells(TypedDict, total=False):
    """An agent's figures as far as they are known; names as in AgentRow."""

    prompt_tokens: float
    ttft_dense_s: float
    ttft_exact_s: float
    ttft_s: float
    tokens: Tokens
    first_token_agreement: float
    mean_kl: float
    top1_agreement: float


class LiveTable:
    """Use as a context manager; ``update`` rows and ``step`` from the thread that measures.

    In a terminal the table is redrawn in place. In a log there is a line of progress every ten seconds and the table
    once at the end.

    Args:
        agents: names of the rows, in order.
        steps: how many times ``step`` will be called.
        title: above the table.
        console: where to; stdout if not given.
    """

    def __init__(self, agents: Sequence[str], steps: int, title: str = "", console: Console | None = None) -> None:
        self._console = console or Console()
        self._title = title
        self._rows: dict[str, Cells] = {name: Cells() for name in agents}
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=steps)
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)
        self._last_log = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._console.print(self._table())

    def update(self, agent: str, **cells: Unpack[Cells]) -> None:
        """Set figures of ``agent``; those not given stay."""
        self._rows[agent].update(cells)

    def step(self, doing: str) -> None:
        """One more step is done; ``doing`` says in a few words what comes now."""
        self._progress.update(self._task, advance=1, description=doing)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_log >= LOG_EVERY_S:
            self._last_log = now
            self._console.print(f"{percent(self._progress.tasks[0].percentage / 100)}  {doing}", highlight=False)

    def _draw(self) -> Group:
        return Group(self._table(), self._progress)

    def _table(self) -> Table:
        gap = (0, 1) if self._console.width >= 100 else (0, 0)
        table = Table(title=self._title or None, box=box.SIMPLE_HEAD, padding=gap, pad_edge=False, show_edge=False)
        table.title_justify = "left"
        table.add_column("agent", no_wrap=True, style="bold")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True, style="green" if heading == _SPEEDUP else None)
        for name, cells in self._rows.items():
            table.add_row(name, *_texts(cells))
        return table


def _texts(cells: Cells) -> list[str]:
    """The row's cells as text; what is not known yet is a dot."""
    dense, reused, tokens = cells.get("ttft_dense_s"), cells.get("ttft_s"), cells.get("tokens")
    known = [
        f"{cells['prompt_tokens']:.0f}" if "prompt_tokens" in cells else _NOT_YET,
        *(f"{t:.3f}" if t is not None else _NOT_YET for t in (dense, cells.get("ttft_exact_s"), reused)),
        times(dense / reused) if dense is not None and reused else _NOT_YET,
    ]
    counts = (tokens.exact, tokens.approximate, tokens.recomputed, tokens.new) if tokens else ()
    known.append("/".join(f"{n:.0f}" for n in counts) or _NOT_YET)
    known.append(percent(cells["first_token_agreement"]) if "first_token_agreement" in cells else _NOT_YET)
    known.append(nats(cells["mean_kl"]) if "mean_kl" in cells else _NOT_YET)
    known.append(percent(cells["top1_agreement"]) if "top1_agreement" in cells else _NOT_YET)
    return known
