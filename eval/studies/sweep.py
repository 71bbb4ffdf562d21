"""Many methods on the same prompts, over kinds of text and topologies: for ``pareto`` and ``ablations``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.progress import Progress

from eval.closeness import CLOSENESS, closeness
from eval.files.progress import stderr_console
from eval.measure import Row
from eval.methods.registry import Method
from eval.running.finished import Finished
from eval.running.jobs import Job, run_jobs, threads_each
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.trial import Trial
from kvcomm.errors import KVCommError

NOT_POINTS = ("dense", "exact")


def sweep(
    setting: Setting,
    tasks: Sequence[str],
    topologies: Sequence[str],
    methods: Mapping[str, Method],
    out: Path,
    jobs: int = 1,
    **trial: Any,
) -> dict[str, Any]:
    """Points for every method, over all texts and by kind of text.

    A task in a topology is a part of its own. Parts that are done are kept beside ``out``: a run that was cut off goes
    on behind them, and one over more tasks or topologies takes those of one over fewer.

    Args:
        methods: by name; ``dense`` must be among them.
        jobs: parts measured at once, each in a process of its own.
        trial: fields of Trial but the topology.

    Raises:
        KVCommError: parts failed; they are named, the others are done and kept.
    """
    rows: dict[tuple[str, str], list[Row]] = {}
    facts = []
    described = setting.describe() | {"threads": threads_each(jobs), "jobs": jobs}
    about = {
        "methods": {name: [method.about, repr(method.policy)] for name, method in methods.items()},
        "trial": trial,
        **described,
    }
    finished = Finished(out.with_suffix(".parts.jsonl"), about)
    parts = {(task, topology): f"{task}, {topology}" for task in tasks for topology in topologies}
    failures = run_jobs(
        setting,
        [Job(name, 1.0, _part, (*key, dict(methods), trial)) for key, name in parts.items()],
        finished,
        jobs,
    )
    if failures:
        raise KVCommError(
            f"{'; '.join(f'{f.name}: {f.error}' for f in failures)}; the other {len(parts) - len(failures)} parts are "
            f"kept in {finished.path}: give the command again to measure these alone"
        )
    for (task, topology), name in parts.items():
        part = finished.get(name)
        rows[task, topology] = part["rows"]
        facts.append({"task": task, "topology": topology, **part["facts"]})
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


def _part(
    setting: Setting, task: str, topology: str, methods: Mapping[str, Method], trial: Mapping[str, Any]
) -> dict[str, Any]:
    """A task in a topology."""
    bench = Trial(topology, **trial).prepare(setting, make_task(task).problems(), methods)
    with Progress(console=stderr_console(), transient=True) as progress:
        found = [slim(row) for row in bench.run_hearers(progress, f"{task}, {topology}")]
    return {"rows": found, "facts": bench.facts()}


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
