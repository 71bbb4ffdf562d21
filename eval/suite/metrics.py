"""Rows to figures: for each method of a cell every metric with its interval and the number of prompts behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.figures.statistics import (
    Estimate,
    bootstrap,
    by_prompt,
    mcnemar,
    mean,
    percentile,
    rank_correlation,
    ratio_of_medians,
    share,
    share_difference,
)
from eval.measure import Row

CLOSENESS = ("mean_kl", "first_kl", "top1", "first_token", "greedy_run_share")
KEPT = {
    "case", "agent", "method", "prompt_tokens", "reuse", "ttft_s", "isolate_s", "answer_tokens", "tie", "greedy_run",
    "score", "choice", "dense_choice", "flops", "expected_error", "held_bytes", "tokens", *CLOSENESS,
}  # fmt: skip


def slim(row: Row) -> Row:
    """A row as it is kept in the results file: without texts, floats to six digits."""
    return {name: _rounded(value) for name, value in row.items() if name in KEPT}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value


def figures(rows: Sequence[Row], methods: Sequence[str], first: str) -> dict[str, dict[str, Any]]:
    """For each method its metrics, ``{"value", "low", "high", "n"}`` each; a metric that nothing was seen of is absent.

    Closeness, reuse and operations are those of the calls behind ``first``, which had nothing to reuse. TTFT's
    percentiles and ``speedup`` are over all calls that were timed, the first one's left out where others were.
    """
    last = {name: [row for row in rows if row["method"] == name] for name in methods}
    return {name: _method(mine, last["dense"], first) for name, mine in last.items() if mine}


def _method(mine: Sequence[Row], dense: Sequence[Row], first: str) -> dict[str, Any]:
    hearing = [row for row in mine if row["agent"] != first]
    found: dict[str, Any] = {}
    for column in ("reuse", *CLOSENESS):
        over_prompts = share if column == "first_token" else mean
        found[column] = over_prompts(list(by_prompt(hearing, column).values())).as_json()
    whole = [{"case": row["case"], "same": row["greedy_run"] == row["answer_tokens"]} for row in hearing]
    found["identical"] = share(list(by_prompt(whole, "same").values())).as_json()
    found["ties"] = sum(row["tie"] for row in hearing)
    found["calls"] = len(hearing)
    found |= _ttft(hearing, [row for row in dense if row["agent"] != first])
    found["flops_saved"] = _flops_saved(hearing, [row for row in dense if row["agent"] != first]).as_json()
    if mine[0]["method"] != "dense":
        found["held_bytes"] = mean(list(_last_of_each(hearing, "held_bytes").values())).as_json()
    if any(row.get("isolate_s") for row in hearing):
        found["isolate"] = mean(list(by_prompt(hearing, "isolate_s").values())).as_json()
    found |= _scores(mine, dense) | _choices(mine)
    correlation = rank_correlation(
        [row["expected_error"] for row in hearing], [row["mean_kl"] for row in hearing]
    )  # of calls
    if correlation is not None and any(row["reuse"] > 0 for row in hearing):
        found["estimate"] = {"spearman": correlation, "n": len(hearing)}
    return found


def _ttft(hearing: Sequence[Row], dense: Sequence[Row]) -> dict[str, Any]:
    """Percentiles over calls, prompts resampled whole; the speed-up over each prompt's mean."""
    groups = _seconds(hearing)
    if not groups:
        return {}
    found: dict[str, Any] = {f"ttft_p{q}": percentile(list(groups.values()), q).as_json() for q in (50, 95, 99)}
    for entry in found.values():
        entry["values"] = sum(map(len, groups.values()))
    true = _seconds(dense)
    above, below = ([float(np.mean(side[case])) for case in groups] for side in (true, groups))
    return found | {"speedup": ratio_of_medians(above, below).as_json()}


def _seconds(rows: Sequence[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["ttft_s"]:
            found[row["case"]] += row["ttft_s"]
    return dict(found)


def _flops_saved(mine: Sequence[Row], dense: Sequence[Row]) -> Estimate:
    """1 less the method's operations over the dense ones, both summed over prompts."""
    spent, true = by_prompt(mine, "flops"), by_prompt(dense, "flops")
    return bootstrap([true[case] for case in spent], list(spent.values()), statistic=_share_saved)


def _share_saved(dense: Any, spent: Any, axis: int = -1) -> Any:
    return 1.0 - np.sum(spent, axis=axis) / np.sum(dense, axis=axis)


def _last_of_each(rows: Sequence[Row], column: str) -> dict[str, float]:
    """The value of each prompt's last row: what is held grows from call to call."""
    return {row["case"]: float(row[column]) for row in rows}


def _scores(mine: Sequence[Row], dense: Sequence[Row]) -> dict[str, Any]:
    """The task's score of answers that the method wrote, beside dense on the same prompts; McNemar's test."""
    own, true = ({row["case"]: row["score"] for row in rows if "score" in row} for rows in (mine, dense))
    cases = [case for case in own if case in true]
    if not cases:
        return {}
    before, after = [true[case] for case in cases], [own[case] for case in cases]
    return {
        "score": share(after).as_json(),
        "score_difference": share_difference(before, after).as_json(),
        "mcnemar_p": mcnemar([s >= 0.5 for s in before], [s >= 0.5 for s in after]),
    }


def _choices(mine: Sequence[Row]) -> dict[str, Any]:
    """How often a judge chooses whom the dense judge chooses."""
    judged = [{"case": row["case"], "same": row["choice"] == row["dense_choice"]} for row in mine if row.get("choice")]
    return {"judge": share(list(by_prompt(judged, "same").values())).as_json()} if judged else {}


def pooled(cells: Sequence[Mapping[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Figures over the prompts of several cells together; prompts of different cells are different prompts."""
    chosen = [cell for cell in cells if wanted(cell)]
    methods = list(dict.fromkeys(name for cell in chosen for name in cell["methods"]))
    everywhere = [name for name in methods if all(name in cell["methods"] for cell in chosen)]
    rows = [
        row | {"case": f"{cell['name']}: {row['case']}", "agent": "" if row["agent"] == cell["first"] else row["agent"]}
        for cell in chosen
        for row in cell["rows"]
    ]
    return figures(rows, everywhere, "") if rows and "dense" in everywhere else {}


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cells, and the figures over all of them that are fully connected."""
    return {"cells": cells, "pooled": pooled(cells, lambda cell: cell["topology"] == "full")}
