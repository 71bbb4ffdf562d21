"""Rows made into cells: one a method, over the agents that hear others, prompts weighted equally."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from eval.measure import Row

CLOSENESS = {
    "mean_kl": "mean_kl",
    "first_kl": "first_kl",
    "top1": "top1",
    "first_token": "first_token",
    "greedy_run": "greedy_run",
    "greedy_run_share": "greedy_run_share",
}
TOKENS = ("exact", "approximate", "recomputed", "new")


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """p50 and p95 of ``seconds``, and how many there were."""
    values = np.array(list(seconds))
    return {"p50": float(np.percentile(values, 50)), "p95": float(np.percentile(values, 95)), "n": len(values)}


def closeness(rows: Sequence[Row]) -> dict[str, float]:
    """Means over rows, each a prompt; ``identical`` counts whole answers equal to the dense one."""
    means = {name: fmean(row[column] for row in rows) for name, column in CLOSENESS.items()}
    return means | {
        "identical": fmean(row["greedy_run"] == row["answer_tokens"] for row in rows),
        "ties": sum(row["tie"] for row in rows),
    }


def cells(rows: Sequence[Row], methods: Sequence[str], about: dict[str, Any], first_agent: str) -> list[dict[str, Any]]:
    """A cell for each method.

    TTFT and tokens are those of the last agent, whose prompt has the length that was asked for; reuse and closeness
    are means over all agents but ``first_agent``, which has nobody to hear. ``by_agent`` has each agent's.
    """
    last = rows[-1]["agent"] if rows[-1]["method"] != "yardstick" else rows[-2]["agent"]
    seconds = {
        (method, agent): [t for row in rows if (row["method"], row["agent"]) == (method, agent) for t in row["ttft_s"]]
        for method in {row["method"] for row in rows} - {"yardstick"}
        for agent in {row["agent"] for row in rows}
    }
    found = []
    for method in methods:
        mine = [row for row in rows if row["method"] == method]
        hearing = [row for row in mine if row["agent"] != first_agent]
        scores = [row["score"] for row in mine if row.get("score") is not None]
        found.append(
            {
                "method": method,
                **about,
                "n": len(hearing),
                "ttft_s": percentiles(seconds[method, last]),
                "dense_ttft_s": percentiles(seconds["dense", last]),
                "exact_ttft_s": percentiles(seconds["exact", last]),
                "speedup": float(np.median(seconds["dense", last]) / np.median(seconds[method, last])),
                "tokens": _tokens([row for row in mine if row["agent"] == last]),
                "reuse": fmean(row["reuse"] for row in hearing),
                "closeness": closeness(hearing),
                "score": {"mean": fmean(scores), "n": len(scores)} if scores else {},
                "by_agent": [_by_agent(mine, agent, seconds) for agent in dict.fromkeys(row["agent"] for row in mine)],
                "rows": mine,
            }
        )
    return found


def _tokens(rows: Sequence[Row]) -> dict[str, float]:
    return {kind: fmean(row["tokens"][kind] for row in rows) for kind in TOKENS}


def _by_agent(rows: Sequence[Row], agent: str, seconds: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    mine = [row for row in rows if row["agent"] == agent]
    method = mine[0]["method"]
    return {
        "agent": agent,
        "prompt_tokens": fmean(row["prompt_tokens"] for row in mine),
        "ttft_s": percentiles(seconds[method, agent]),
        "dense_ttft_s": percentiles(seconds["dense", agent]),
        "speedup": float(np.median(seconds["dense", agent]) / np.median(seconds[method, agent])),
        "tokens": _tokens(mine),
        "reuse": fmean(row["reuse"] for row in mine),
        "closeness": closeness(mine),
    }
