"""The command on the real model, in small; a run that was cut off goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.studies import verified


@pytest.mark.slow
def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "TOKENS", 8)
    monkeypatch.setattr(verified, "LENGTHS", (4, 20))
    out = tmp_path / "verified.json"
    asked = {"tasks": "documents", "prompts": 2, "healing": 1, "fill_prompts": 1, "prompt_tokens": 480, "piece": 100}

    def cut_off(*arguments: object) -> None:
        raise KeyboardInterrupt

    whole = verified.measure
    monkeypatch.setattr(verified, "measure", lambda *a: whole(*a) if a[2] == 0 else cut_off())
    with pytest.raises(KeyboardInterrupt):
        verified.verified(**asked, seed=1, model=None, out=out)  # type: ignore[arg-type]
    monkeypatch.setattr(verified, "measure", lambda *a: whole(*a) if a[2] == 1 else cut_off())
    verified.verified(**asked, seed=1, model=None, out=out)  # type: ignore[arg-type]
    result = json.loads(out.read_text())
    found, healing = result["verified"], result["healing"]
    assert found["prompts"] == 2 and found["equal"] + found["ties"] == 2 and found["different"] == 0
    assert found["with_drafts"] == 2 and found["drafts"] >= 4
    assert healing["prompts"] == 1
    assert healing["kl_last_16_with"] <= healing["kl_last_16_without"] and healing["kl_20_with"] >= 0
    assert {"kl_4_with", "kl_4_without", "wall_8_with_s", "wall_8_without_s"} <= healing.keys()
    assert not list(tmp_path.glob("*.jsonl"))
