"""Nearly equal texts: what is edited, and that all three ways are measured on the real model."""

from __future__ import annotations

import json
import random
from pathlib import Path

from eval.studies import near


def test_so_many_words_are_replaced_by_others_of_the_text() -> None:
    text = "alpha beta gamma delta, epsilon; zeta.\n  theta"
    changed = near.edited(text, 3, random.Random(0))
    before, after = text.split(), changed.split()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 3
    assert near.edited("a 12 b", 3, random.Random(0)) == "a 12 b"
    assert near.edited("lonely", 1, random.Random(0)) == "other"


def test_small(tmp_path: Path) -> None:
    out = tmp_path / "near.json"
    near.near("documents", 1, 1, words=2, agents=3, prompt_tokens=440, answer_tokens=4, seed=1, model=None, out=out)
    methods = json.loads(out.read_text())["methods"]
    assert {point["n"] for point in methods.values()} == {2}
    # what differs, and what stands in between, is computed; what is the same is not
    assert methods["held"]["new"] < methods["near"]["new"] < methods["computed"]["new"]
    assert all(point["mean_kl"] >= 0 for point in methods.values())
