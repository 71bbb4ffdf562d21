"""Sizes of a trial that make no sense are refused by name, before a model is loaded."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from eval.running.setting import Setting
from eval.trial import Trial
from kvcomm.errors import InvalidInput

GOOD: dict[str, Any] = {
    "topology": "full", "agents": 2, "prompts": 1, "fill_prompts": 0, "prompt_tokens": 1, "answer_tokens": 1,
    "repeats": 1, "seed": 0, "fill_by": "prefill",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("agents", 0, "agents is 0; give at least 1"),
        ("prompts", 0, "prompts is 0; give at least 1"),
        ("fill_prompts", -1, "fill-prompts is -1; give at least 0"),
        ("prompt_tokens", 0, "prompt-tokens is 0; give at least 1"),
        ("answer_tokens", -4, "answer-tokens is -4; give at least 1"),
        ("repeats", 0, "repeats is 0; give at least 1"),
        ("seed", -1, "seed is -1; give at least 0"),
        ("rounds", 0, "rounds is 0; give at least 1"),
        ("topology", "ring", "topology 'ring' must be one of"),
        ("fill_by", "magic", "fill-by 'magic' generate or prefill"),
    ],
)
def test_numbers_below_the_least_are_refused(name: str, value: Any, said: str) -> None:
    Trial(**GOOD)
    with pytest.raises(InvalidInput, match=said):
        Trial(**GOOD | {name: value})


@pytest.mark.parametrize("command", ["pareto", "ablations", "near", "offsets", "learning", "verified", "demo"])
def test_no_model_is_loaded_for_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    from eval import __main__ as main

    def loaded(name: str | None) -> Setting:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Setting, "load", loaded)
    monkeypatch.setattr(sys, "argv", ["eval", command, "--seed", "-1", "--out", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as raised:
        main.main()
    assert raised.value.code == 1
    assert "error: seed is -1; give at least 0" in capsys.readouterr().err
