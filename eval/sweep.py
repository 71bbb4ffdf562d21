"""Many methods on the same prompts, over kinds of text and topologies: for ``pareto`` and ``ablations``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.progress import Progress

from eval.cells import CLOSENESS, closeness
from eval.finished import Finished
from eval.measure import Row
from eval.methods import Method
from eval.progress import stderr_console
from eval.setting import Setting
from eval.tasks import make_task
from eval.trial import Trial

NOT_POINTS = ("dense", "exact")


def sweep(
    setting: Setting,
    tasks: Sequence[str],
    topologies: Sequence[str],
    methods: Mapping[str, Method],
    out: Path,
    **trial: Any,
) -> dict[str, Any]:
    """Points for every method, over all texts and by kind of text.

    A task in a topology is a part of its own. Parts that are done are kept beside ``out`` until the whole is, and a run
    that was cut off goes on behind them.

    Args:
        methods: by name; ``dense`` must be among them.
        trial: fields of Trial but the topology.
    """
    rows: dict[tuple[str, str], list[Row]] = {}
    facts = []
    described = setting.describe()
    about = {
        "methods": {name: [method.about, repr(method.policy)] for name, method in methods.items()},
        "trial": trial,
        **described,
    }
    finished = Finished(out.with_suffix(".parts.jsonl"), about)
    with Progress(console=stderr_console()) as progress:
        for task in tasks:
            for topology in topologies:
                name = f"{task}, {topology}"
                if finished.get(name) is None:
                    bench = Trial(topology, **trial).prepare(setting, make_task(task).problems(), methods)
                    found = [slim(row) for row in bench.run_hearers(progress, name)]
                    finished.add(name, {"rows": found, "facts": bench.facts()})
                part = finished.get(name)
                rows[task, topology] = part["rows"]
                facts.append({"task": task, "topology": topology, **part["facts"]})
    finished.clear()
    everything = [row for found in rows.values() for row in found]
    return {
        **described,
        "setting": trial | {"methods": {name: m.about for name, m in methods.items()}, "learned": facts},
        "points": points(everything, methods),
        "by_text": {
            task: points([row for (name, _), found in rows.items() if name == task for row in found], methods)
            for task in tasks
        },
        "yardstick": closeness([row for row in everything if row["method"] == "yardstick"]),
        "rows": [row | {"task": task, "topology": top} for (task, top), found in rows.items() for row in found],
    }


def points(rows: Sequence[Row], methods: Mapping[str, Method]) -> list[dict[str, Any]]:
    """A point for each method: means over prompts, medians of seconds."""
    dense = median(t for row in rows if row["method"] == "dense" for t in row["ttft_s"])
    found = []
    for name in methods:
        mine = [row for row in rows if row["method"] == name]
        if name in NOT_POINTS or not mine:
            continue
        seconds = [t for row in mine for t in row["ttft_s"]]
        found.append(
            {
                "method": name,
                "recompute": 1.0 - fmean(row["reuse"] for row in mine),
                "reuse": fmean(row["reuse"] for row in mine),
                **closeness(mine),
                "ttft_s": median(seconds),
                "dense_ttft_s": dense,
                "n": len(mine),
                "n_ttft": len(seconds),
            }
        )
    return found


def slim(row: Row) -> Row:
    """A row without texts, its figures rounded to six digits."""
    kept = {"case", "agent", "method", "prompt_tokens", "reuse", "ttft_s", "answer_tokens", "tie", *CLOSENESS}
    return {
        name: [round(t, 6) for t in value] if isinstance(value, list) else rounded(value)
        for name, value in row.items()
        if name in kept
    }


def rounded(value: Any) -> Any:
    """A float to six significant digits; anything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def print_points(result: Mapping[str, Any]) -> None:
    """The points, least recompute first, a line each."""
    for point in sorted(result["points"], key=lambda p: p["recompute"]):
        print(
            f"{point['method']:28} recompute {point['recompute']:6.1%}  "
            f"KL {point['mean_kl']:.5f}  first {point['first_kl']:.5f}  top-1 {point['top1']:.4f}  "
            f"TTFT {point['ttft_s']:.3f} of {point['dense_ttft_s']:.3f} s  n {point['n']}"
        )
