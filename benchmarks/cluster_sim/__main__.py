"""Command line of the simulation.

``python -m benchmarks.cluster_sim --out results/cluster-sim.json --plots docs`` runs the sweep; with ``--nodes 1000
--shards 8`` one cluster. ``--check`` with ``--measured`` predicts a run of the demo from others; ``--out`` then
adds that to the sweep's file, ``--page`` to its page: docs/cluster-sim.md has the whole command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from benchmarks.cluster_sim import costs as unit_costs
from benchmarks.cluster_sim.cluster import Cluster
from benchmarks.cluster_sim.demo import compare, into, table, within
from benchmarks.cluster_sim.workload import SOURCES, Shape

NODES = (10, 30, 100, 300, 1000)
SHARDS = (1, 2, 4, 8, 16)
FULL = 0.9


def sweep(costs: unit_costs.Costs, shape: Shape, seconds: float, seed: int) -> dict[str, object]:
    """Every number of nodes with every number of shards, and for each number of shards where the service saturates."""
    runs = [
        Cluster(costs, shape, nodes, shards, seed).run(seconds).summary() for shards in SHARDS for nodes in NODES
    ]  # fmt: skip
    cold = [Cluster(costs, shape, nodes, 1, seed, reuse=False).run(seconds).summary() for nodes in NODES[:2]]
    return {"runs": runs, "without_reuse": cold, "saturates_at_nodes": saturation(runs)}


def saturation(runs: list[dict[str, object]]) -> dict[str, int | None]:
    """For each number of shards, the least number of nodes at which the busiest shard is busy 90 % of the time."""
    found: dict[str, int | None] = {}
    for run in sorted(runs, key=lambda r: int(str(r["nodes"]))):
        shards = str(run["shards"])
        found.setdefault(shards, None)
        if found[shards] is None and float(str(run["busiest_shard"])) >= FULL:
            found[shards] = int(str(run["nodes"]))
    return found


def check(
    costs: unit_costs.Costs, demo: Path, runs: list[Path], out: Path | None, page: Path | None
) -> dict[str, object]:
    """What the file of the sweep holds, and the comparison as its member ``demo``; a table of it goes into the page."""
    measured = json.loads(demo.read_text())
    compared = compare(costs, [json.loads(run.read_text()) for run in runs], measured)
    held: dict[str, object] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    held["demo"] = {
        **{one.name: {**dataclasses.asdict(one), "error": round(one.error, 4)} for one in compared},
        "tokens": measured["tokens"], "costs_from": [run.name for run in runs], "within_20_percent": within(compared),
    }  # fmt: skip
    print(table(compared, measured["tokens"]))
    if page is not None:
        page.write_text(into(page.read_text(), table(compared, measured["tokens"])))
    return held


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, default=unit_costs.DEFAULT)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--check", type=Path, help="results/cluster.json of python -m benchmarks.cluster")
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="runs of other lengths: the unit costs")
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    costs, sources = unit_costs.read(chosen.costs)
    shape = Shape()
    result: dict[str, object] = {
        "command": "python -m benchmarks.cluster_sim", "seed": chosen.seed, "seconds": chosen.seconds,
        "shape": dataclasses.asdict(shape), "sources": {**sources, **SOURCES},
    }  # fmt: skip
    started = time.perf_counter()
    if chosen.check is not None:
        result = check(costs, chosen.check, chosen.measured, chosen.out, chosen.page)
    elif chosen.nodes is not None:
        cluster = Cluster(costs, shape, chosen.nodes, chosen.shards, chosen.seed)
        result |= cluster.run(chosen.seconds).summary()
    else:
        result |= sweep(costs, shape, chosen.seconds, chosen.seed)
        if chosen.plots is not None:
            from benchmarks.cluster_sim.plots import draw

            draw(result, chosen.plots)
    print(f"took {time.perf_counter() - started:.1f} s")
    text = json.dumps(result, indent=1)
    print(text if chosen.out is None else f"wrote {chosen.out}")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
