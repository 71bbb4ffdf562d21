"""Verified(): in the end the answer is the model's own, whatever the drafts were."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextIteratorStreamer

from eval.tasks import make_task
from kvcomm import Balanced, Engine, Exact, Fast, Healed, InvalidInput, Verified
from kvcomm.closeness import common_run, is_tie
from kvcomm.reuse.prompt import Prompt
from tests.hf.engines import GREEDY, engine_of, state, two_agents
from tests.hf.reused import FREE, plain_answer, spoil, taught
from tests.tiny_models import SWITCH_LENGTH

FAMILIES = ["llama", "qwen2", "gemma3"]
NEW = 20


def verified(engine: Engine, prompt: Prompt, piece: int = 12, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, **GREEDY, **options}
    reply = engine.generate(prompt, policy=Verified(FREE, piece), **options)
    made = reply.exactness
    assert made is not None and reply.usage.approximate > 0
    assert made.drafts >= 1 and 0 <= made.taken_back <= made.drafts
    assert len(made.final_s) == len(reply.token_ids) and list(made.final_s) == sorted(made.final_s)
    assert reply.ttft_s <= made.exact_s <= made.final_s[0]
    return reply


@pytest.mark.parametrize("spoiled", [None, 3.0, 1e4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_the_models_own(family: str, spoiled: float | None) -> None:
    """Over KV this far off nothing approximate could be left without spoiling all that comes after it."""
    engine, prompts = taught(family)
    if spoiled is not None:
        spoil(engine, prompts, spoiled)
    draw = random.Random(1)
    drafts = back = ties = 0
    for prompt in prompts:
        whole = {"return_dict_in_generate": True, "output_logits": True}
        reply = verified(engine, prompt, piece=draw.randint(3, 40), **whole)
        expected = plain_answer(engine, prompt, max_new_tokens=NEW, **GREEDY)
        if list(reply.token_ids) != expected:
            first = next(n for n, (a, b) in enumerate(zip(reply.token_ids, expected, strict=True)) if a != b)
            assert is_tie(reply.output.logits[first][0])
            ties += 1
        drafts, back = drafts + reply.exactness.drafts, back + reply.exactness.taken_back
    assert ties <= 1 and drafts >= 2 * len(prompts)
    if spoiled is not None:
        assert back >= drafts / 2, "spoiled KV gave right drafts: it was not used"


def test_one_token_and_pieces_of_any_length() -> None:
    engine, prompts = taught()
    for piece in (1, 7, 64, 10_000):
        reply = verified(engine, prompts[0], piece, max_new_tokens=1)
        assert list(reply.token_ids) == plain_answer(engine, prompts[0], max_new_tokens=1, **GREEDY)
        assert reply.exactness.drafts == 1
        reply = verified(engine, prompts[0], piece)
        assert list(reply.token_ids) == plain_answer(engine, prompts[0], max_new_tokens=NEW, **GREEDY)
        assert reply.exactness.drafts == 1 or piece < 100


@pytest.mark.parametrize("spoiled", [False, True])
def test_an_end_inside_the_drafts(spoiled: bool) -> None:
    """At each place of the answer; and, where drafts are wrong, a draft that ends an answer which goes on."""
    engine, prompts = taught()
    if spoiled:
        spoil(engine, prompts)
    wrong = 0
    for prompt in prompts[:3]:
        whole = plain_answer(engine, prompt, max_new_tokens=NEW, **GREEDY)
        drafted = engine.generate(prompt, policy=FREE, max_new_tokens=6, **GREEDY).token_ids
        for end in sorted({*whole[:6], *drafted, 0}):
            options = {"eos_token_id": end, "pad_token_id": 0}
            reply = verified(engine, prompt, 6, **options)
            assert list(reply.token_ids) == plain_answer(engine, prompt, max_new_tokens=NEW, **GREEDY, **options)
            wrong += len(reply.token_ids) > 1 and reply.exactness.taken_back == 1
    assert wrong or not spoiled


@pytest.mark.parametrize("spoiled", [False, True])
def test_stop_strings_across_the_place_of_return(spoiled: bool) -> None:
    engine, prompts = taught()
    if spoiled:
        spoil(engine, prompts)
    stopped = 0
    for prompt in prompts[:3]:
        whole = plain_answer(engine, prompt, max_new_tokens=NEW, **GREEDY)
        for n in range(5):
            string = engine.tokenizer.decode(whole[n : n + 2], skip_special_tokens=True)
            if not string.strip():
                continue
            reply = verified(engine, prompt, 6, stop_strings=[string])
            again = {"stop_strings": [string], "tokenizer": engine.tokenizer}
            expected = plain_answer(engine, prompt, max_new_tokens=NEW, **GREEDY, **again)
            assert list(reply.token_ids) == expected
            stopped += len(expected) < NEW
    assert stopped > 5


class Odd(LogitsProcessor):
    """Depends on how long the text is."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, input_ids.shape[1] % 2 :: 2] -= 3.0  # in place, as transformers allows
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 3},
        {"min_new_tokens": 5, "eos_token_id": [4, 40, 17], "pad_token_id": 0},
        {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 5, "pad_token_id": 0},
        {"begin_suppress_tokens": [*range(30, 60)], "forced_eos_token_id": 9},
        {"bad_words_ids": [[33], [34, 35]], "sequence_bias": [[[40], 2.0]]},
        {"prefix_allowed_tokens_fn": lambda _, ids: [*range(20 + len(ids) % 5, 90)]},
        {"logits_processor": [Odd()]},
    ],
    ids=lambda options: "-".join(options),
)
def test_processors_and_scores_are_a_plain_runs(options: dict[str, Any]) -> None:
    engine, prompts = taught()
    spoil(engine, prompts, 2.0)
    outputs = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    for prompt in prompts[:4]:
        reply = verified(engine, prompt, 6, **options, **outputs)
        ids = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(ids)
        own: Any = engine.model.generate
        expected = own(ids, attention_mask=mask, max_new_tokens=NEW, **GREEDY, **options, **outputs)
        assert reply.output.sequences.tolist() == expected.sequences.tolist()
        assert len(reply.output.scores) == len(expected.scores) == len(expected.logits) == len(reply.output.logits)
        torch.testing.assert_close(torch.cat(reply.output.logits), torch.cat(expected.logits), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat(reply.output.scores), torch.cat(expected.scores), atol=2e-4, rtol=1e-4)
        assert reply.output.past_key_values.get_seq_length() == len(prompt) + len(reply.token_ids) - 1


@pytest.mark.parametrize("spoiled", [None, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_those_of_a_plain_run_with_the_same_seed(family: str, spoiled: float | None) -> None:
    engine, prompts = taught(family)
    if spoiled is not None:
        spoil(engine, prompts, spoiled)
    drafts = back = 0
    for seed, prompt in enumerate(prompts):
        options = {"do_sample": True, "temperature": 0.8, "top_k": 30, "max_new_tokens": NEW}
        torch.manual_seed(seed)
        reply = verified(engine, prompt, 6, **options)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert list(reply.token_ids) == plain_answer(engine, prompt, **options)
        assert torch.equal(torch.get_rng_state(), after), "the generator stands elsewhere than after a plain run"
        drafts, back = drafts + reply.exactness.drafts, back + reply.exactness.taken_back
    assert back > 0 if spoiled is not None else back < drafts


def test_criteria_see_final_tokens_only_and_plain_streamers_too() -> None:
    engine, prompts = taught()
    spoil(engine, prompts)
    prompt, seen = prompts[0], []

    class Sees(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
            seen.append(input_ids[0, len(prompt) :].tolist())
            return torch.tensor([len(seen) == 7])  # type: ignore[return-value]

    streamer: Any = TextIteratorStreamer(engine.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=20)
    reply = verified(engine, prompt, 4, stopping_criteria=[Sees()], streamer=streamer)
    expected = plain_answer(engine, prompt, max_new_tokens=7, **GREEDY)
    assert list(reply.token_ids) == expected and seen == [expected[: n + 1] for n in range(7)]
    assert "".join(streamer) == reply.text


def test_where_nothing_is_approximate_the_models_own_generate_runs() -> None:
    engine, prompts = taught(learn=True)
    for policy in (Verified(Exact()), Healed(Exact())):
        reply = engine.generate(prompts[0], policy=policy, max_new_tokens=6, num_beams=1, **GREEDY)
        made = reply.exactness
        assert made is not None and (made.drafts, made.healed_tokens, len(made.final_s)) == (0, 0, 6)
    assert engine.generate(prompts[0], max_new_tokens=2, **GREEDY).exactness is None


@pytest.mark.parametrize("family", ["llama-longrope", "phi3"])
def test_a_call_that_may_cross_longropes_switch_is_computed(family: str) -> None:
    engine = engine_of(family, policy=FREE)
    writer, critic = two_agents(engine)
    task = "Go. " * (SWITCH_LENGTH // 4 - 30)
    writer.study(task=task)
    prompt = critic.prompt(task=task, draft="On.")
    near = SWITCH_LENGTH - len(prompt)
    assert near > 0
    fork = engine.fork(learn=False)
    reply = fork.generate(prompt, policy=Verified(FREE), max_new_tokens=near + 4, **GREEDY)
    assert reply.usage.approximate == 0 and reply.exactness.drafts == 0
    assert list(reply.token_ids) == plain_answer(engine, prompt, max_new_tokens=near + 4, **GREEDY)
    assert verified(fork, prompt, 100, max_new_tokens=4).exactness.drafts > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "num_beams or num_return_sequences 2 under Verified"),
        ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences 3 under Verified"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 under Verified"),
    ],
)
def test_what_cannot_be_verified_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    engine, prompts = taught(learn=True)
    before = state(engine)
    with pytest.raises(InvalidInput, match=said):
        engine.generate(prompts[0], policy=Verified(), max_new_tokens=3, **{**GREEDY, **options})
    assert state(engine) == before


def test_batches_prefill_and_force_are_refused_by_name() -> None:
    engine, prompts = taught(learn=True)
    before = state(engine)
    with pytest.raises(InvalidInput, match="prompts 2 under Verified"):
        engine.generate_batch(prompts[:2], policy=Verified(), max_new_tokens=3, **GREEDY)
    with pytest.raises(InvalidInput, match="prompts 2 under Healed"):
        engine.generate_batch(prompts[:2], policy=Healed(), max_new_tokens=3, **GREEDY)
    with pytest.raises(InvalidInput, match=r"prefill with policy=Balanced\(\)"):
        engine.prefill(prompts[0], policy=Verified())
    with pytest.raises(InvalidInput, match=r"Verified\(\) works while"):
        engine.force(prompts[0], prompts[1].parts[1].segment, policy=Verified())
    assert state(engine) == before


@pytest.mark.parametrize("wrapper", [Verified, Healed])
def test_wrappers_take_a_policy_and_a_number_of_tokens(wrapper: Any) -> None:
    assert wrapper() == wrapper(Balanced()) and wrapper(Fast()).policy == Fast()
    for piece in (0, -1, 2.5, True):
        with pytest.raises(InvalidInput, match="1 or more"):
            wrapper(piece=piece)
    with pytest.raises(InvalidInput, match="heals already"):
        wrapper(Healed())
    with pytest.raises(InvalidInput, match="heals already"):
        wrapper(Verified())
    with pytest.raises(InvalidInput, match="pass a value"):
        wrapper(Balanced)


@pytest.mark.slow
def test_the_real_model(smollm: tuple[Any, Any]) -> None:
    """Texts that another agent has read; the drafts once right for the most part, once over spoiled KV."""
    model, tokenizer = smollm
    engine = Engine(model, tokenizer, policy=FREE, weights="real")
    writer, critic = two_agents(engine)
    tasks = [problem.task_text for problem in make_task("humaneval").problems()[:5]]
    for task in tasks:
        writer.study(task=task)
    for task in tasks[2:]:
        critic.study(task=task, draft="    return sorted(xs)")
    prompts = [critic.prompt(task=task, draft="    return max(xs)") for task in tasks[:2]]
    engine.learn = False
    ties = drafts = back = 0
    for spoiled in (False, True):
        if spoiled:
            spoil(engine, prompts, 1.0)
        for prompt in prompts:
            outputs = {"return_dict_in_generate": True, "output_logits": True}
            reply = verified(engine, prompt, 32, max_new_tokens=16, **outputs)
            expected = plain_answer(engine, prompt, max_new_tokens=16, **GREEDY)
            drafts, back = drafts + reply.exactness.drafts, back + reply.exactness.taken_back
            run = common_run(reply.token_ids, expected)
            if run < max(len(expected), len(reply.token_ids)):
                assert is_tie(reply.output.logits[run][0])
                ties += 1
    assert ties <= 1 and 0 < back < drafts
