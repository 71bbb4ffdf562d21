"""Closeness over rows, prompts weighted equally."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from eval.measure import Row

CLOSENESS = ("mean_kl", "first_kl", "top1", "first_token", "greedy_run", "greedy_run_share")


def closeness(rows: Sequence[Row]) -> dict[str, float]:
    """Means over rows, each a prompt; ``identical`` counts whole answers equal to the dense one."""
    means = {name: fmean(row[name] for row in rows) for name in CLOSENESS}
    return means | {
        "identical": fmean(row["greedy_run"] == row["answer_tokens"] for row in rows),
        "ties": sum(row["tie"] for row in rows),
    }
