"""LongRoPE: prompts and answers on both sides of the length at which the model changes its frequencies."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm import Balanced, Engine, Exact, Fast, InvalidInput, Segment, Slot
from kvcomm.reuse.splice import cut
from tests.hf.engines import GREEDY, TOLERANCE, answer, bases, engine_of, kv_error, state
from tests.reuse.scene import filled, tokens
from tests.tiny_models import SWITCH_LENGTH


@pytest.fixture(params=["llama-longrope", "phi3"])
def engine(request: pytest.FixtureRequest) -> Engine:
    made = engine_of(request.param, policy=Fast(learn_first=0))
    made.agent("reader", ["Read: ", Slot("text"), "\nAnswer:"])
    return made


def text_of(engine: Engine, length: int, seed: int = 0) -> Segment:
    """A text that makes the reader's prompt ``length`` tokens long."""
    fixed = len(engine.agents["reader"].prompt(text=Segment((9,)))) - 1
    return Segment(tokens(length - fixed, seed))


def ask(engine: Engine, text: Segment, tokens: int, **options: Any) -> Any:
    return engine.agents["reader"].generate(text=text, max_new_tokens=tokens, options=GREEDY, **options)


def test_a_prompt_beyond_the_switch_is_computed_densely(engine: Engine) -> None:
    ask(engine, text_of(engine, 100), 2)
    short, text = state(engine), text_of(engine, SWITCH_LENGTH + 5)
    reply = ask(engine, text, 4)
    assert "LongRoPE" in reply.plan.why and reply.usage.cached_tokens == 0
    assert reply.token_ids == answer(engine, reply.plan.prompt, 4)
    assert state(engine) == short  # its KV is of another frame and is not kept


@pytest.mark.parametrize("policy", [Exact(), Fast(learn_first=0), Balanced(gate=False, learn_first=0)])
def test_an_answer_that_crosses_the_switch(engine: Engine, policy: Any) -> None:
    """The answer is the model's own, the prompt's KV is kept, the answer's, of two frames, is not."""
    text = text_of(engine, SWITCH_LENGTH - 3)
    reply = ask(engine, text, 9, policy=policy)
    prompt = reply.plan.prompt
    assert reply.token_ids == answer(engine, prompt, 9)
    assert bases(engine, text) and not bases(engine, reply.segment)
    expected = cut(filled(engine.backend, prompt.token_ids), engine.backend.spec, prompt.starts[1], prompt.starts[2])
    assert kv_error(engine.pool.bases(text)[0].kv, expected) < 10 * TOLERANCE  # a thousand tokens' sums
    again = ask(engine, text, 9, policy=Exact())
    assert again.usage.exact > 0 and again.token_ids == reply.token_ids


def test_an_answer_up_to_the_switch_is_kept(engine: Engine) -> None:
    reply = ask(engine, text_of(engine, SWITCH_LENGTH - 8), 8)
    assert bases(engine, reply.segment)


def test_nothing_is_studied_or_isolated_across_the_switch(engine: Engine) -> None:
    reader = engine.agents["reader"]
    before = state(engine)
    assert reader.study(text=text_of(engine, SWITCH_LENGTH + 1)) == 0
    assert reader.study(text=text_of(engine, SWITCH_LENGTH - 1), answer=Segment((7,) * 5)) == 0
    assert engine.isolate([Segment((7,) * SWITCH_LENGTH)]) == 0
    assert state(engine) == before


def test_forcing_across_the_switch_is_refused(engine: Engine) -> None:
    text, before = text_of(engine, SWITCH_LENGTH - 3), state(engine)
    with pytest.raises(InvalidInput, match=f"length of {SWITCH_LENGTH} at which LongRoPE"):
        engine.agents["reader"].force(Segment((7,) * 9), text=text)
    assert state(engine) == before
    logits, _ = engine.agents["reader"].force(Segment((7,) * 4), text=text_of(engine, SWITCH_LENGTH + 3))
    assert len(logits) == 4 and state(engine) == before
