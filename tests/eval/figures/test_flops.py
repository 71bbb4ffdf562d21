"""Operations and judges' choices, by hand on a tiny model."""

from __future__ import annotations

import pytest
import torch

from eval.figures.flops import attention_flops, prefill_flops, token_flops
from eval.figures.judge import chosen
from kvcomm import Dense, Exact
from kvcomm.errors import InvalidInput
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import Segment
from tests.eval.tiny_setting import tiny_setting


def test_operations_by_hand() -> None:
    setting = tiny_setting()
    model, width, inner, vocabulary = setting.model, 32, 48, len(setting.tokenizer)
    layer = width * width + 2 * width * 16 + width * width + 3 * width * inner  # q, k and v of one head, o, and the MLP
    assert token_flops(model) == 2 * 3 * layer
    assert attention_flops(model) == 4 * 3 * 32
    engine = setting.engine()
    prompt = Prompt((Part(Segment(tuple(range(10, 30))), "a/#0"), Part(Segment(tuple(range(50, 60))), "a/x")))
    dense = engine.generate(prompt, max_new_tokens=1, policy=Dense(), do_sample=False).plan
    head = 2 * width * vocabulary
    assert prefill_flops(model, dense) == pytest.approx(30 * 2 * 3 * layer + 4 * 3 * 32 * sum(range(1, 31)) + head)
    again = engine.generate(prompt, max_new_tokens=1, policy=Exact(), do_sample=False).plan
    assert again.counts.exact == 29
    assert prefill_flops(model, again) == pytest.approx(2 * 3 * layer + 4 * 3 * 32 * 30 + head)


def test_a_judge_chooses_among_the_names_alone() -> None:
    tokenizer = tiny_setting().tokenizer
    names = ("planner", "analyst")
    planner, analyst = (tokenizer(name.capitalize(), add_special_tokens=False)["input_ids"][0] for name in names)
    dense, other = torch.zeros(len(tokenizer)), torch.zeros(len(tokenizer))
    dense[7] = other[7] = 50.0  # likelier than any name, and nobody's
    dense[planner], other[analyst] = 3.0, 2.0
    assert chosen(tokenizer, names, dense, other) == {"choice": "analyst", "dense_choice": "planner"}
    assert chosen(tokenizer, (), dense, other) == {}
    with pytest.raises(InvalidInput, match="same token"):
        chosen(tokenizer, ("planner", "planner"), dense, other)
