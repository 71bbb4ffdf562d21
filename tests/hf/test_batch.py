"""Several prompts in one call: the tokens of a plain batch, plans and usage of their own, and KV that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm import Balanced, Dense, Engine, Exact, Fast, InvalidInput
from kvcomm.errors import PromptTooLong
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.splice import cut
from tests.hf.engines import GREEDY, TOLERANCE, answer, bases, engine_of, kv_error, state, two_agents
from tests.reuse.scene import filled
from tests.tiny_models import MAX_POSITIONS, SWITCH_LENGTH

FAMILIES = ["llama", "mistral", "gemma3"]
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True},
    {"do_sample": False, "eos_token_id": list(range(60)), "pad_token_id": 0},
]
LABELS = ["writer/reply", "critic/reply", "writer/reply"]
PAD = 0


def prompts_of(engine: Engine) -> list[Prompt]:
    """Three prompts of two agents, of 60 to 140 tokens."""
    writer, critic = two_agents(engine)
    return [
        writer.prompt(task="Say what a sliding window is for."),
        critic.prompt(task="Say what a sliding window is for.", draft="It is for looking out of, sideways. " * 2),
        writer.prompt(task="Go."),
    ]


def plain_batch(engine: Engine, prompts: list[Prompt], **options: Any) -> torch.Tensor:
    """What model.generate alone returns for the prompts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + list(p.token_ids) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = engine.model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    return output if isinstance(output, torch.Tensor) else output.sequences


def hold(engine: Engine, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        engine.study(prompt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_batch_is_the_models_own_under_exact(family: str, options: dict[str, Any]) -> None:
    """Cold and held, windows of 32 exceeded, rows that end at different times."""
    engine = engine_of(family, policy=Exact())
    prompts = prompts_of(engine)
    torch.manual_seed(11)
    expected = plain_batch(engine, prompts, max_new_tokens=9, **options)
    for held in (False, True):
        torch.manual_seed(11)
        replies = engine.generate_batch(prompts, labels=LABELS, max_new_tokens=9, **options)
        output = replies[0].output
        assert torch.equal(output if isinstance(output, torch.Tensor) else output.sequences, expected)
        returned = options.get("num_return_sequences", 1)
        for n, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            row = expected[n * returned, max(map(len, prompts)) :].tolist()
            assert list(reply.token_ids) == row[: len(reply.token_ids)] and len(reply.texts) == returned
            assert reply.plan.prompt == prompt and reply.usage.prompt_tokens == len(prompt)
            assert reply.usage.exact == (len(prompt) - 1 if held else 0)
            assert reply.usage.completion_tokens >= len(reply.token_ids)
        hold(engine, prompts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [GREEDY, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_the_kv_kept_of_a_batch_is_a_dense_prefills(family: str, options: dict[str, Any]) -> None:
    engine = engine_of(family, policy=Exact())
    prompts = prompts_of(engine)
    replies = engine.generate_batch(prompts, labels=LABELS, max_new_tokens=7, **options)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply.segment) == 7
        dense = filled(engine.backend, (*prompt.token_ids, *reply.segment.token_ids))
        (base,) = engine.pool.bases(reply.segment)
        expected = cut(dense, engine.backend.spec, len(prompt), len(prompt) + 7)
        assert kv_error(base.kv, expected) < TOLERANCE and base.recipe.exact
        for index, (part, start) in enumerate(zip(prompt.parts, prompt.starts, strict=True)):
            exact = [b for b in engine.pool.bases(part.segment) if b.recipe.preceding == prompt.preceding[index]]
            expected = cut(dense, engine.backend.spec, start, start + len(part.segment))
            assert kv_error(exact[0].kv, expected) < TOLERANCE


def test_rows_that_end_early_are_cut_at_their_end() -> None:
    """The filling-up behind them is in neither ids, text, usage nor KV."""
    engine = engine_of(policy=Exact())
    prompts = prompts_of(engine)
    whole = [answer(engine, prompt, 9) for prompt in prompts]
    end = whole[0][3]
    replies = engine.generate_batch(
        prompts, labels=LABELS, max_new_tokens=9, eos_token_id=end, pad_token_id=7, **GREEDY
    )
    for ids, reply in zip(whole, replies, strict=True):
        stop = ids.index(end) if end in ids else 9
        assert reply.token_ids == ids[: stop + 1] and reply.segment.token_ids == ids[:stop]
        assert reply.usage.completion_tokens == len(reply.token_ids)
    assert len({len(reply.token_ids) for reply in replies}) > 1


def test_each_row_has_its_own_plan() -> None:
    """Reuse between agents, in a batch whose rows are planned apart; each row is what it is alone."""
    engine = engine_of(policy=Fast(learn_first=0, dense_above=1.0))
    prompts = prompts_of(engine)
    engine.agents["writer"].study(task="Say what a sliding window is for.")
    frozen = engine.fork(learn=False)
    alone = [frozen.generate(prompt, max_new_tokens=6, **GREEDY) for prompt in prompts]
    together = frozen.generate_batch(prompts, max_new_tokens=6, **GREEDY)
    for one, row in zip(alone, together, strict=True):
        assert one.token_ids == row.token_ids and one.usage == row.usage
        assert [p.action for p in one.plan.parts] == [p.action for p in row.plan.parts]
    assert [row.usage.approximate > 0 for row in together] == [False, True, True]
    assert together[0].usage.exact == len(prompts[0]) - 1


def test_a_batch_teaches_like_single_calls() -> None:
    policy = Balanced(gate=False, learn_first=0)
    one, other = engine_of(policy=policy), engine_of(policy=policy)
    for engine in (one, other):
        prompts = prompts_of(engine)
        hold(engine, prompts[:1])
        if engine is one:
            engine.generate_batch(prompts[1:], labels=LABELS[1:], max_new_tokens=4, policy=Dense(), **GREEDY)
        else:
            for prompt, label in zip(prompts[1:], LABELS[1:], strict=True):
                engine.generate(prompt, label=label, max_new_tokens=4, policy=Dense(), **GREEDY)
    assert one.pool.digest() == other.pool.digest()
    assert set(one.book.statistics.pairs) == set(other.book.statistics.pairs) != set()


def test_wrong_batches_change_nothing() -> None:
    engine = engine_of(policy=Exact())
    prompts = prompts_of(engine)
    before = state(engine)
    for wrong, labels, said in (([], None, "0 prompts"), (prompts, ["a"], "3 prompts and 1 labels")):
        with pytest.raises(InvalidInput, match=said):
            engine.generate_batch(wrong, labels=labels)
    with pytest.raises(PromptTooLong):
        engine.generate_batch(prompts, max_new_tokens=MAX_POSITIONS - len(prompts[0]))
    with pytest.raises(InvalidInput, match=r"output_hidden_states=True.*one prompt"):
        engine.generate_batch(prompts, policy=Dense(), output_hidden_states=True)
    with pytest.raises(InvalidInput, match="pass a list of prompts, each made with agent.prompt"):
        engine.generate_batch([prompts[0], 3])  # type: ignore[list-item]
    assert state(engine) == before


def test_longrope_prompts_on_both_sides_of_the_switch_are_refused() -> None:
    engine = engine_of("llama-longrope", policy=Exact())
    writer, _ = two_agents(engine)
    short, long = writer.prompt(task="Go."), writer.prompt(task="Go. " * (SWITCH_LENGTH // 3))
    with pytest.raises(InvalidInput, match="both sides of the length of 1024"):
        engine.generate_batch([short, long], max_new_tokens=2, **GREEDY)
    expected = plain_batch(engine, [short, short], max_new_tokens=4, **GREEDY)
    replies = engine.generate_batch([short, short], max_new_tokens=4, **GREEDY)
    assert torch.equal(replies[0].output, expected)


def test_a_reply_of_a_batch_fills_a_slot() -> None:
    engine = engine_of(policy=Fast(learn_first=0))
    prompts = prompts_of(engine)
    writer, critic = two_agents(engine)
    replies = engine.generate_batch(prompts, labels=LABELS, max_new_tokens=20, **GREEDY)
    assert bases(engine, replies[2].segment) == [("decode", "writer/reply", True)]
    verdict = critic.generate(draft=replies[2], task="Go.", max_new_tokens=2, options=GREEDY)
    assert verdict.usage.approximate >= len(replies[2].segment)
