"""Rows to cells, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from eval.cells import cells, percentiles


def row(method: str, agent: str, case: str, seconds: list[float], **changed: Any) -> dict[str, Any]:
    plain = {
        "method": method, "agent": agent, "case": case, "ttft_s": seconds, "reuse": 0.0, "mean_kl": 0.0,
        "first_kl": 0.0, "top1": 1.0, "first_token": 1.0, "greedy_run": 4, "greedy_run_share": 1.0, "answer_tokens": 4,
        "tie": False, "prompt_tokens": 100, "tokens": {"exact": 0, "approximate": 0, "recomputed": 0, "new": 100},
    }  # fmt: skip
    return plain | changed


def test_percentiles_by_hand() -> None:
    # numpy's linear rule: the 95th of 1..5 lies at place 0.95 * 4 = 3.8, between 4 and 5
    assert percentiles([5.0, 1.0, 4.0, 2.0, 3.0]) == {"p50": 3.0, "p95": pytest.approx(4.8), "n": 5}


def test_a_cell_by_hand() -> None:
    tokens = {"exact": 10, "approximate": 60, "recomputed": 10, "new": 20}
    rows = []
    for case, kl, reuse, run in (("p", 0.1, 0.6, 4), ("q", 0.3, 0.8, 1)):
        rows += [row(method, "a", case, [9.0]) for method in ("dense", "exact", "kvcomm")]
        rows += [row("dense", "b", case, [4.0, 6.0]), row("exact", "b", case, [2.5])]
        rows.append(
            row("kvcomm", "b", case, [1.0, 3.0], mean_kl=kl, reuse=reuse, greedy_run=run, tokens=tokens, score=1.0)
        )
    found = cells(rows, ["dense", "exact", "kvcomm"], {"task": "t"}, "a")[2]
    assert (found["method"], found["task"], found["n"]) == ("kvcomm", "t", 2)
    assert found["ttft_s"] == {"p50": 2.0, "p95": 3.0, "n": 4}
    assert found["speedup"] == pytest.approx(5.0 / 2.0)  # medians of 4 6 4 6 and of 1 3 1 3
    assert found["reuse"] == pytest.approx(0.7)
    assert found["closeness"]["mean_kl"] == pytest.approx(0.2) and found["closeness"]["identical"] == 0.5
    assert found["tokens"] == tokens and found["score"] == {"mean": 1.0, "n": 2}
    assert [entry["agent"] for entry in found["by_agent"]] == ["a", "b"]
    assert found["by_agent"][0]["speedup"] == 1.0
