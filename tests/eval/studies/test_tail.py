"""Two conversations at once, small, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.running.setting import Setting
from eval.studies import tail
from eval.tasks.prose import passages
from kvcomm.errors import InvalidInput
from tests.eval.tiny_setting import tiny_setting


def test_every_call_of_every_conversation_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "load", lambda name: tiny_setting())
    out = tmp_path / "tail.json"
    tail.tail(conversations=3, turns=3, answer_tokens=2, seed=0, model=None, out=out)
    result = json.loads(out.read_text())
    for name in ("dense", "exact", "kvcomm"):
        found = result["methods"][name]
        assert found["calls"] == 9
        assert 0 < found["ttft_p50"]["value"] <= found["ttft_p95"]["value"] <= found["ttft_p99"]["value"]
        assert found["ttft_p99"]["n"] == 3
    reused = {name: found["reused"] for name, found in result["methods"].items()}
    assert reused["dense"] == 0 < reused["exact"]
    turns = [row["turn"] for row in result["rows"] if row["method"] == "exact" and row["case"] == "conversation 2"]
    assert turns == [1, 2, 3]


def test_conversations_share_passages_and_differ() -> None:
    shared = passages(tail.PASSAGE_WORDS, tail.PASSAGES, 0)
    first, second = (tail.script(shared, n, 10, 0) for n in (0, 1))
    assert first != second and first == tail.script(shared, 0, 10, 0)
    assert {passage for _, passage in first} & {passage for _, passage in second}


def test_one_conversation_alone_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 2"):
        tail.tail(conversations=1, turns=1, answer_tokens=1, seed=0, model=None, out=Path("unused.json"))
