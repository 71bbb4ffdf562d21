"""The sweep as two drawings: TTFT, and how busy the busiest shard is, over the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write ``cluster-sim-ttft.svg`` and ``cluster-sim-shards.svg``; the same result gives the same bytes."""
    _lines(
        result, lambda run: run["ttft_s"]["p95"], "p95 of TTFT [s]", folder / "cluster-sim-ttft.svg"
    )  # fmt: skip
    _lines(result, lambda run: run["busiest_shard"], "busiest shard, share of time", folder / "cluster-sim-shards.svg")


def _lines(result: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float], label: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvcomm"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for shards in sorted({run["shards"] for run in result["runs"]}):
        runs = [run for run in result["runs"] if run["shards"] == shards]
        name = "1 shard" if shards == 1 else f"{shards} shards"
        axes.plot([run["nodes"] for run in runs], [value(run) for run in runs], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("nodes")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
