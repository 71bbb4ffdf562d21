"""All of ``make bench`` on the real model, with sizes at which it takes seconds: the form of its results."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench
from benchmarks.common import RealText, Size, rounds
from benchmarks.team import Team
from eval.running.setting import Setting
from kvcomm.errors import InvalidInput

ROW = {
    *("agent", "dense_s", "exact_s", "balanced_s", "fast_s", "mean_kl", "top1"),
    *("fast_mean_kl", "fast_top1", "rerotate_mean_kl", "rerotate_top1"),
}


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in numbers(item)]
    return [leaf for item in value for leaf in numbers(item)] if isinstance(value, list) else [value]


@pytest.mark.slow
def test_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--small", "--out", str(out)])
    bench.main()
    result = json.loads(out.read_text())
    leaves = numbers({name: value for name, value in result.items() if name != "made"})
    assert all(math.isfinite(leaf) for leaf in leaves if not isinstance(leaf, str)) and None not in leaves
    assert {"gb_per_s", "memcpy_gb_per_s", "ratio"} <= result["splice"].keys()
    assert {"s_per_token", "dense_s_per_token", "ratio"} <= result["recompute"].keys()
    assert [row["agent"] for row in result["ttft"]] == [1, 2, 3] and all(row.keys() == ROW for row in result["ttft"])
    first, last = result["ttft"][0], result["ttft"][-1]
    assert first["mean_kl"] < 1e-6 < last["rerotate_mean_kl"] and first["fast_top1"] == 1.0
    counts = result["ttft_details"][-1]["computed_tokens"]
    assert counts["fast"] == 1 < counts["balanced"] < counts["exact"] < counts["dense"]
    assert result["floor"]["by_agent"][-1]["fast_s"] > 0 and result["memory"]["pool_bytes"] > 0
    assert result["made"].keys() == set(bench.PARTS) and result["made"]["ttft"]["size"]["agents"] == 3
    monkeypatch.setattr(sys, "argv", ["bench", "--small", "--only", "splice", "--out", str(out)])
    bench.main()
    again = json.loads(out.read_text())
    assert again["splice"] != result["splice"] and again["ttft"] == result["ttft"]


def test_calls_take_turns_and_another_one_begins_each_round() -> None:
    order: list[str] = []

    def call(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = rounds({name: lambda name=name: call(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab" and found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_the_published_shape(smollm: tuple[Any, Any]) -> None:
    """Five agents, 512-token prefixes, 1,024 input tokens, 512-token messages, no text twice."""
    model, tokenizer = smollm
    team = Team.build(Setting(model, tokenizer, "", "digest"), Size())
    cases = [*team.learned, *team.measured]
    for case in cases:
        prompts = [team.engine.agents[name].prompt(**team.slots(case, name)) for name in team.names]
        assert all(500 <= len(prompt.parts[0].segment) <= 512 for prompt in prompts)
        lengths = [len(prompt) for prompt in prompts]
        assert 3550 <= lengths[-1] <= 3650
        assert all(b - a == pytest.approx(520, abs=12) for a, b in zip(lengths, lengths[1:], strict=False))
    texts = [segment.token_ids for case in cases for segment in case.messages.values()]
    assert len(set(texts)) == len(texts) == 40 and {len(text) for text in texts} == {512}
    assert len({case.task for case in cases}) == 8


def test_wrong_sizes_are_refused(smollm: tuple[Any, Any]) -> None:
    for wrong in ({"agents": 6}, {"repeats": 0}, {"segments": 3}):
        with pytest.raises(InvalidInput, match="give numbers of at least 1"):
            Size(**wrong)
    with pytest.raises(InvalidInput, match="tokens of text were asked for"):
        RealText(smollm[1]).segment(10**7)
