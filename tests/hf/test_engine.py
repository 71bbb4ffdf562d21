"""The Engine: what it keeps and learns, and that frozen, forked and foreign engines do not mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm import Balanced, Dense, Engine, Exact, Fast, InvalidInput, Segment, Slot
from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.softmax import SoftmaxBook
from kvcomm.reuse.splice import cut
from tests.hf.engines import GREEDY, TOLERANCE, answer, bases, engine_of, kv_error, plain, state, two_agents
from tests.reuse.scene import filled

BALANCED = Balanced(gate=False, learn_first=0)
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 3},
    {"do_sample": False, "repetition_penalty": 1.3, "return_dict_in_generate": True, "output_logits": True},
]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_generate_is_the_models_own_under_exact(family: str, options: dict[str, Any]) -> None:
    """Cold and with the whole prompt held, beams and several sequences too; windows of 32 are exceeded."""
    engine = engine_of(family, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task="Say what a sliding window is for.")
    torch.manual_seed(5)
    expected = plain(engine, prompt, max_new_tokens=9, **options)
    for held in (0, len(prompt) - 1):
        torch.manual_seed(5)
        reply = writer.generate(task="Say what a sliding window is for.", max_new_tokens=9, options=options)
        sequences = reply.output if isinstance(reply.output, torch.Tensor) else reply.output.sequences
        assert torch.equal(sequences, expected if isinstance(expected, torch.Tensor) else expected.sequences)
        assert reply.usage.exact == held and reply.usage.approximate == 0
        if held == 0:
            assert bases(engine, reply.segment) == [("decode", "writer/reply", True)]
            writer.study(task="Say what a sliding window is for.")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "deepseek_v2"])
@pytest.mark.parametrize("cold", [True, False])
def test_the_kv_kept_is_a_dense_prefills(family: str, cold: bool) -> None:
    """Of the prompt's parts and of the answer, after generation, under Exact."""
    engine = engine_of(family, policy=Exact())
    writer, _ = two_agents(engine)
    if not cold:
        writer.study(task="Count the waves.")
    reply = writer.generate(task="Count the waves.", max_new_tokens=12, options=GREEDY)
    prompt = reply.plan.prompt
    ids = (*prompt.token_ids, *reply.segment.token_ids)
    dense = filled(engine.backend, ids)
    starts = [*prompt.starts, len(prompt)]
    for segment, start in zip([*(part.segment for part in prompt.parts), reply.segment], starts, strict=True):
        base = engine.pool.bases(segment)[0]
        expected = cut(dense, engine.backend.spec, start, start + len(segment))
        assert kv_error(base.kv, expected) < TOLERANCE
        assert base.recipe.exact
    assert bases(engine, reply.segment) == [("decode", "writer/reply", True)]


def test_a_reply_fills_another_agents_slot() -> None:
    engine = engine_of(policy=Fast(learn_first=0))
    writer, critic = two_agents(engine)
    draft = writer.generate(task="Name a colour.", max_new_tokens=10, options=GREEDY)
    prompt = critic.prompt(draft=draft, task="Name a colour.")
    assert prompt.parts[1].segment == draft.segment
    verdict = critic.generate(draft=draft, task="Name a colour.", max_new_tokens=3, options=GREEDY)
    origins = {part.part.label: part.why for part in verdict.plan.parts if part.action == "approximate"}
    assert origins == {
        "critic/draft": "base from decode of writer/reply",
        "critic/task": "base from prompt of writer/task",
    }
    assert verdict.usage.approximate == len(draft.segment) + len(prompt.parts[3].segment)
    assert verdict.usage.cached_tokens == verdict.usage.approximate + verdict.usage.exact


def test_an_answer_is_cut_at_its_end() -> None:
    """The end-of-text token is in token_ids and not in the segment; what is told to generate counts."""
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    greedy = answer(engine, writer.prompt(task="Go."), 12)
    end = greedy[4]
    first = greedy.index(end)
    for given in ({"eos_token_id": end}, {"eos_token_id": [127, end]}):
        reply = engine.fork().agents["writer"].generate(task="Go.", max_new_tokens=12, options={**GREEDY, **given})
        assert reply.token_ids == greedy[: first + 1]
        assert reply.segment.token_ids == greedy[:first]
    engine.model.generation_config.eos_token_id = [end, 126]
    reply = writer.generate(task="Go.", max_new_tokens=12, options=GREEDY)
    assert (reply.token_ids, reply.segment.token_ids) == (greedy[: first + 1], greedy[:first])
    assert bases(engine, reply.segment)[0][0] == ("decode" if first else ())


def test_learning_off_freezes_everything() -> None:
    engine = engine_of(policy=BALANCED)
    writer, critic = two_agents(engine)
    for task in ("one", "two and more", "three"):
        draft = writer.generate(task=task, max_new_tokens=6, options=GREEDY)
        critic.study(draft=draft, task=task)
    assert engine.book.gains
    before = state(engine)
    frozen = engine.fork(policy=BALANCED, learn=False).agents["critic"]
    draft = Segment(draft.segment.token_ids)
    replies = [frozen.generate(draft=draft, task="three", max_new_tokens=8, options=GREEDY) for _ in range(3)]
    assert len({(reply.token_ids, reply.pool_version, reply.usage) for reply in replies}) == 1
    assert state(engine) == before
    assert replies[0].usage.approximate > 0
    off = Engine(engine.model, engine.tokenizer, policy=BALANCED, pool=engine.pool, book=engine.book, learn=False)
    two_agents(off)[1].generate(draft="new text", task="four", max_new_tokens=2, options=GREEDY)
    assert state(engine) == before


def test_a_fork_keeps_its_additions_to_itself() -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    writer.generate(task="shared", max_new_tokens=4, options=GREEDY)
    before = state(engine)
    one, other = engine.fork(), engine.fork()
    one.agents["writer"].generate(task="a secret", max_new_tokens=4, options=GREEDY)
    one.agents["writer"].study(task="another secret")
    assert state(engine) == before
    secret = writer.template.text_segment("a secret")
    assert bases(one, secret) and not bases(engine, secret) and not bases(other, secret)
    assert bases(one.fork(), secret)  # a fork of a fork reads through
    assert bases(other.fork().fork(), writer.template.text_segment("shared"))  # through empty pools as well
    version = one.version
    writer.study(task="later")
    assert one.version != version  # a fork's version moves with what it reads
    one.agent("late", ["only here"])
    assert "late" not in engine.agents


def test_namespaces_share_nothing() -> None:
    one = engine_of(policy=Balanced(gate=False, learn_first=0), namespace="one")
    other = Engine(one.model, one.tokenizer, policy=one.policy, namespace="other")
    for engine in (one, other):
        two_agents(engine)
    one.agents["writer"].generate(task="secret", max_new_tokens=4, options=GREEDY)
    empty = state(other)
    reply = other.fork(learn=False).agents["writer"].generate(task="secret", max_new_tokens=4, options=GREEDY)
    assert reply.usage.cached_tokens == 0 and state(other) == empty
    keys = [engine.pool.digest() for engine in (one, other)]
    other.agents["writer"].generate(task="secret", max_new_tokens=4, options=GREEDY)
    assert one.pool.digest() == keys[0] != other.pool.digest()
    with pytest.raises(InvalidInput, match="belongs to namespace one"):
        Engine(one.model, one.tokenizer, namespace="third", pool=one.pool)


@pytest.mark.parametrize("book", [OffsetBook, SoftmaxBook])
def test_offsets_are_learned_and_used(book: type[OffsetBook]) -> None:
    engine = engine_of(policy=BALANCED)
    engine.book = book(engine.backend.spec.fingerprint)
    writer, critic = two_agents(engine)
    for n in range(4):
        task = f"Task {n}: count to {n + 7}."
        writer.study(task=task)
        assert critic.study(task=task, draft=f"draft {n}") >= 1
    assert engine.book.calls("critic/task") == 4 and engine.book.gains
    writer.study(task="Task 9: count to 16.")
    reply = critic.generate(task="Task 9: count to 16.", draft="draft", max_new_tokens=4, options=GREEDY)
    assert reply.usage.approximate > 0


def test_the_first_calls_of_a_place_are_dense_while_learning() -> None:
    engine = engine_of(policy=Balanced(gate=False, learn_first=2, dense_above=1.0))
    writer, critic = two_agents(engine)
    actions = []
    for n in range(4):
        task = f"A longer task, number {n}, of some forty characters."
        writer.study(task=task)
        reply = critic.generate(draft="x", task=task, max_new_tokens=1, options=GREEDY)
        actions.append((reply.usage.approximate > 0, "to learn offsets" in reply.plan.why))
    assert actions == [(False, True), (False, True), (True, False), (True, False)]


def test_a_text_known_before_is_isolated_once() -> None:
    engine = engine_of()
    text = Segment((20, 21, 22))
    assert engine.isolate([text, Segment(()), text]) == 1 and engine.isolate([text]) == 0
    assert bases(engine, text) == [("isolated", "", False)]
    prefix = engine.neutral_prefix()
    expected = cut(
        filled(engine.backend, (*prefix.token_ids, *text.token_ids)), engine.backend.spec, len(prefix), len(prefix) + 3
    )
    assert kv_error(engine.pool.bases(text)[0].kv, expected) < TOLERANCE
    assert engine.isolate([text], behind=Segment((9,))) == 1


def test_forced_logits_are_the_models_own() -> None:
    engine = engine_of("mistral")
    writer, _ = two_agents(engine)
    reply = Segment(tuple(range(30, 50)))
    prompt = writer.prompt(task="Any.")
    with torch.inference_mode():
        model: Any = engine.model
        dense = model(torch.tensor([[*prompt.token_ids, *reply.token_ids]])).logits[0, len(prompt) - 1 : -1]
    for policy in (Dense(), Exact()):
        logits, plan = writer.force(reply, task="Any.", policy=policy)
        assert logits.shape == dense.shape and plan.counts.total == len(prompt)
        torch.testing.assert_close(logits, dense, rtol=0, atol=1e-4)
    assert engine.pool.bases(reply)


def test_prefilled_goes_into_model_generate() -> None:
    """Also where the model's own settings ask for another cache, as some checkpoints' do."""
    engine = engine_of("gemma3", policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task="Hand me over.")
    expected = plain(engine, prompt, max_new_tokens=5, **GREEDY)
    engine.model.generation_config.cache_implementation = "static"
    engine.model.generation_config.use_cache = False
    model: Any = engine.model
    found = model.generate(**engine.prefill(prompt).generate_kwargs(), max_new_tokens=5, **GREEDY)
    assert torch.equal(found, expected)
    assert torch.equal(writer.generate(task="Hand me over.", max_new_tokens=5, options=GREEDY).output, expected)


def test_the_same_segment_twice_in_one_prompt() -> None:
    engine = engine_of(policy=Fast(learn_first=0))
    twin = engine.agent("twin", [Slot("a"), " and ", Slot("b"), " and so on and so on"])
    first = twin.generate(a="the same text", b="the same text", max_new_tokens=4, options=GREEDY)
    assert first.token_ids == answer(engine, first.plan.prompt, 4)
    assert len(engine.pool.bases(twin.template.text_segment("the same text"))) == 1
    second = twin.generate(a="the same text", b="the same text", max_new_tokens=4, options=GREEDY)
    assert second.usage.exact > 0 and second.usage.prompt_tokens == first.usage.prompt_tokens


def test_exact_for_one_call_serves_every_agent_that_repeats_its_prompt() -> None:
    engine = engine_of(policy=Balanced(gate=False))
    task, draft = "Sort the list of words by their length and say why. " * 3, "Use sorted with a key. " * 6
    for _ in range(2):
        writer, critic = two_agents(engine)
        writer.generate(task=task, max_new_tokens=2, policy=Exact(), options=GREEDY)
        reply = critic.generate(task=task, draft=draft, max_new_tokens=2, policy=Exact(), options=GREEDY)
    assert reply.usage.exact == reply.usage.prompt_tokens - 1
