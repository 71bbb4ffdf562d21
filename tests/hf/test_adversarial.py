"""Prompts made to break reuse, on the real model: what hangs on its context, and is reused out of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcomm import Engine
from kvcomm.check.prompts import Example, divided, read, shipped
from kvcomm.check.study import Row, study
from kvcomm.reuse.policy import Balanced

HARD = Path(__file__).parents[1] / "adversarial.jsonl"
BOUND = 0.05
FEW = ("pronoun", "contradicting", "base64")
"""A prompt of each of these kinds is run here; ``python -m eval trust`` runs them all."""


def few() -> list[Example]:
    examples = read(HARD)
    return [next(example for example in examples if example.kind == kind) for kind in FEW]


def test_there_are_forty_of_all_kinds() -> None:
    examples = read(HARD)
    assert len(examples) >= 40 and len({example.kind for example in examples}) >= 10
    assert sum(example.first != example.texts for example in examples) >= 15
    assert len({(example.texts, example.question) for example in examples}) == len(examples)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_is_far_above_the_bound_unnoticed(smollm: tuple[Any, Any]) -> None:
    engine = Engine(*smollm, policy=Balanced(gate=False))
    assert engine.calibration.fits(engine.pool.fingerprint)  # the one that is shipped
    fill = [example for example in divided(shipped())[0] if len(example.texts) == 2][:3]
    policies = {"bounded": Balanced(max_kl=BOUND, gate=False), "tight": Balanced(max_kl=BOUND / 25, gate=False)}
    rows: dict[str, list[Row]] = {name: [] for name in policies}
    for row in study(engine, fill, few(), policies, answer_tokens=8):
        rows[row.method].append(row)
    for row in rows["bounded"]:
        noticed = row.judgement is not None and row.judgement.bound > BOUND
        assert row.kl <= 4 * BOUND or noticed, row
    judged = [row.judgement for row in rows["bounded"] if row.judgement is not None]
    assert judged and all(judgement.calibrated for judgement in judged)
    # A tighter bound computes more, and is closer
    assert sum(row.reuse for row in rows["tight"]) < sum(row.reuse for row in rows["bounded"])
    assert sum(row.kl for row in rows["tight"]) <= sum(row.kl for row in rows["bounded"])
