"""The simulation repeats, counts right on a cluster worked out by hand, and its check of the demo can fail."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from benchmarks.cluster_sim import costs as unit_costs
from benchmarks.cluster_sim.__main__ import saturation
from benchmarks.cluster_sim.cluster import Cluster, Lru
from benchmarks.cluster_sim.demo import MARK, compare, into, measured, simulate, table, within
from benchmarks.cluster_sim.workload import SOURCES, Shape
from kvcomm.errors import InvalidInput

COSTS, _ = unit_costs.read()
SMALL = Shape(sessions_s=0.02, namespaces=8)


def test_same_seed_same_output_and_another_seed_another() -> None:
    first, again, other = (Cluster(COSTS, SMALL, 10, 2, seed).run(60.0).summary() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_number_has_a_source(tmp_path: Path) -> None:
    assert set(SOURCES) >= {f.name for f in dataclasses.fields(Shape)} - {
        "appended_sigma",
        "pause_sigma",
        "shared_tokens",
    }
    found = json.loads(unit_costs.DEFAULT.read_text())
    found["decode_s"]["source"] = ""
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(InvalidInput, match="decode_s"):
        unit_costs.read(tmp_path / "bad.json")


def test_dense_cost_is_the_sum_over_tokens() -> None:
    by_token = sum(COSTS.dense_a_s + COSTS.dense_b_s * (100 + i) for i in range(1000))
    assert COSTS.dense_s(1000, 100) == pytest.approx(by_token, rel=1e-3)
    assert COSTS.dense_s(300) + COSTS.dense_s(700, 300) == pytest.approx(COSTS.dense_s(1000))


def test_lru_keeps_what_was_used_last() -> None:
    held = Lru(30)
    for number in range(3):
        held.add((0, 0, number), 10)
    assert held.use((0, 0, 0))
    held.add((0, 0, 3), 10)
    assert [held.use((0, 0, n)) for n in range(4)] == [True, False, True, True]
    held.add((0, 0, 9), 31)  # more than all
    assert not held.use((0, 0, 9))


def test_reuse_is_faster_and_every_token_is_in_one_tier() -> None:
    reused = Cluster(COSTS, SMALL, 10, 1, 0).run(120.0)
    dense = Cluster(COSTS, SMALL, 10, 1, 0, reuse=False).run(120.0)
    assert dense.summary()["share_of_tokens"] == {"memory": 0.0, "disk": 0.0, "service": 0.0, "computed": 1.0}
    assert reused.tokens["memory"] > 0 and reused.tokens["service"] > 0
    assert sorted(reused.ttft_s)[len(reused.ttft_s) // 2] < sorted(dense.ttft_s)[len(dense.ttft_s) // 2]
    assert reused.fetched_bytes == pytest.approx(reused.tokens["service"] * COSTS.bytes_per_token)


def test_a_slow_service_saturates_and_shards_relieve_it() -> None:
    slow = dataclasses.replace(COSTS, service_bytes_s=2e7)
    shape = dataclasses.replace(SMALL, sticky=0.0, zipf=0.0)
    one, four = (Cluster(slow, shape, 20, shards, 0).run(120.0).summary() for shards in (1, 4))
    assert float(str(one["busiest_shard"])) > 0.9 > float(str(four["mean_shard"]))
    runs = [{"nodes": n, "shards": 1, "busiest_shard": b} for n, b in ((100, 0.95), (10, 0.2), (30, 0.91))]
    assert saturation(runs) == {"1": 30}  # type: ignore[arg-type]
    assert saturation([{"nodes": 10, "shards": 2, "busiest_shard": 0.1}]) == {"2": None}


def test_thousand_nodes_take_under_two_minutes_of_this_process() -> None:
    start = time.process_time()
    found = Cluster(COSTS, Shape(), 1000, 8, 0).run(120.0).summary()
    assert int(str(found["calls"])) > 500
    assert time.process_time() - start < 120


def demo(tokens: int, costs: unit_costs.Costs) -> dict[str, object]:
    """A run of the demo that went just as these costs say."""
    moved = (tokens - 1) * COSTS.bytes_per_token
    return {
        "tokens": tokens,
        "cached_tokens": tokens - 1,
        "bytes_moved": moved,
        **simulate(costs, tokens, tokens - 1, moved),
    }


def test_demo_is_predicted_from_runs_of_other_lengths_and_what_disagrees_is_refused() -> None:
    machine = dataclasses.replace(COSTS, recompute_share=0.0, dense_a_s=9e-4, splice_s=5e-5, service_bytes_s=3e8)
    runs, result = [demo(1000, machine), demo(3000, machine)], demo(2000, machine)
    found = measured(COSTS, runs)
    for name in ("dense_a_s", "dense_b_s", "splice_s", "last_token_s", "service_bytes_s"):
        assert getattr(found, name) == pytest.approx(getattr(machine, name), rel=1e-4)
    compared = compare(COSTS, runs, result)
    assert [one.name for one in compared] == ["cold_s", "local_s", "remote_s"]
    assert within(compared, 0.001)
    for name in ("cold_s", "local_s", "remote_s"):
        for factor in (0.7, 1.3):
            assert not within(compare(COSTS, runs, {**result, name: float(str(result[name])) * factor}))
    for bad in ({"tokens": 0}, {"cold_s": None}, {"cached_tokens": 5000}, {"remote_s": True}, {"tokens": 3000}):
        with pytest.raises(InvalidInput):
            compare(COSTS, runs, {**result, **bad})
    with pytest.raises(InvalidInput, match="two lengths"):
        compare(COSTS, runs[:1], result)
    with pytest.raises(InvalidInput, match="under the local one"):
        compare(COSTS, [runs[0], {**runs[1], "remote_s": 1e-6}], result)
    assert "| remote |" in into(f"before {MARK}\nold{MARK} after", table(compared, 2000))
    with pytest.raises(InvalidInput, match="marks"):
        into("no marks", "text")
