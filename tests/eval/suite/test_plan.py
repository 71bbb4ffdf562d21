"""Presets can be built from the real texts, without a model; the time is read off a measured run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eval.models.default import resolve
from eval.suite import plan as plan_module
from eval.suite.plan import cost_per_second, planned
from eval.suite.presets import Cell, preset
from kvcomm.errors import InvalidInput


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve(None))


@pytest.mark.parametrize("cell", preset("paper")[::4] + preset("paper")[-1:], ids=lambda cell: cell.name)
def test_the_published_shape_can_be_built(cell: Cell, tokenizer: Any) -> None:
    found = planned(cell, tokenizer)
    assert found.error == "" and found.calls == cell.trial.agents
    wanted = cell.trial.prompt_tokens
    assert 0.85 * wanted <= found.shortest <= found.longest <= 1.15 * wanted


def test_a_cell_that_cannot_be_built_says_why(tokenizer: Any) -> None:
    cell = preset("quick")[0]
    found = planned(replace(cell, trial=replace(cell.trial, prompts=10_000)), tokenizer)
    assert "10000 measured" in found.error and found.calls == 0


def test_time_is_read_off_a_measured_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = preset("quick")
    result = {"preset": "quick", "cells": [{"name": cell.name, "seconds": 10.0} for cell in cells[:2]]}
    monkeypatch.setattr(plan_module, "read_suite", lambda path: result)
    assert cost_per_second(tmp_path, cells) == pytest.approx((cells[0].cost + cells[1].cost) / 20)
    with pytest.raises(InvalidInput, match="none of the cells"):
        cost_per_second(tmp_path, preset("paper")[:1])
