"""Every argument of model.generate and every field of its config: handed on with the model's own result, or refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from kvcomm import Dense, Engine, Exact, InvalidInput
from kvcomm.hf.arguments import FIELDS, HANDED_ON, METADATA, REFUSED, WITH_A_FILLED_CACHE
from tests.hf.engines import GREEDY, answer, engine_of, plain, state, two_agents

DOC = Path(__file__).parents[2] / "docs" / "generate.md"
TASK, NEW = "Say what a sliding window is for.", 8
# What generate takes by name in its **kwargs and hands to neither the config nor the model.
UNLISTED = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
# What it would hand to the model's forward, as far as it speaks of the prompt or the cache.
FORWARD = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache"}
ENGINES = {"label", "policy", "started"}


class Ban(LogitsProcessor):
    """Forbids one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.token] = -torch.inf
        return scores


class StopAt(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done)  # type: ignore[return-value]


class Collect(BaseStreamer):
    """Collects what is streamed."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


SAMPLED = {"do_sample": True}


def cases(engine: Engine) -> dict[str, dict[str, Any]]:
    """For each name that is handed on, a call in which it matters; the model's greedy answer says which tokens do."""
    prompt = engine.agents["writer"].prompt(task=TASK)
    first, second, third, *_ = answer(engine, prompt, NEW)
    end, length = {"eos_token_id": third, "pad_token_id": 5}, len(prompt)
    ids = torch.tensor([prompt.token_ids[:9]])
    return {
        "generation_config": {"generation_config": GenerationConfig(do_sample=False, suppress_tokens=[first])},
        "logits_processor": {"logits_processor": LogitsProcessorList([Ban(first)])},
        "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([StopAt(length + 3)])},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [20, 21, 22]},
        "streamer": {"streamer": Collect(), **SAMPLED},
        "negative_prompt_ids": {"guidance_scale": 3.0, "negative_prompt_ids": ids},
        "negative_prompt_attention_mask": {
            "guidance_scale": 3.0,
            "negative_prompt_ids": ids,
            "negative_prompt_attention_mask": torch.tensor([[0] * 4 + [1] * 5]),
        },
        "tokenizer": {"tokenizer": engine.tokenizer, "stop_strings": engine.tokenizer.decode([second])},
        "min_length": {**end, "min_length": length + 6},
        "min_new_tokens": {**end, "min_new_tokens": 6},
        "early_stopping": {**end, "num_beams": 4, "early_stopping": True},
        "max_time": {"max_time": 0.0},
        "stop_strings": {"stop_strings": engine.tokenizer.decode([second]), "tokenizer": engine.tokenizer},
        "do_sample": SAMPLED,
        "num_beams": {"num_beams": 4},
        "temperature": {**SAMPLED, "temperature": 3.0},
        "top_k": {**SAMPLED, "top_k": 1},
        "top_p": {**SAMPLED, "top_p": 0.3},
        "min_p": {**SAMPLED, "min_p": 0.9},
        "top_h": {**SAMPLED, "top_h": 0.1},
        "typical_p": {**SAMPLED, "typical_p": 0.2},
        "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.2},
        "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.9},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
        "length_penalty": {**end, "num_beams": 4, "length_penalty": -5.0},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[first]]},
        "renormalize_logits": {**SAMPLED, "renormalize_logits": True, "return_dict_in_generate": True},
        "forced_bos_token_id": {"forced_bos_token_id": 9},
        "forced_eos_token_id": {"forced_eos_token_id": 9},
        "remove_invalid_values": {"remove_invalid_values": True},
        "exponential_decay_length_penalty": {"eos_token_id": 9, "exponential_decay_length_penalty": (1, 9.0)},
        "suppress_tokens": {"suppress_tokens": [first, second]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first]},
        "sequence_bias": {"sequence_bias": [[[first], -50.0]]},
        "guidance_scale": {"guidance_scale": 3.0},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=20.0)},
        "num_return_sequences": {**SAMPLED, "num_return_sequences": 3},
        "output_scores": {"output_scores": True, "return_dict_in_generate": True, "repetition_penalty": 2.0},
        "output_logits": {"output_logits": True, "return_dict_in_generate": True},
        "return_dict_in_generate": {"return_dict_in_generate": True, "num_beams": 3, "output_scores": True},
        "pad_token_id": {**end, **SAMPLED, "num_return_sequences": 3, "temperature": 0.5},
        "bos_token_id": {"bos_token_id": 1},
        "eos_token_id": {"eos_token_id": [9, third]},
        "use_cache": {"use_cache": True},
        "disable_compile": {"disable_compile": True},
        "max_new_tokens": {"generation_config": GenerationConfig(max_new_tokens=3)},
    }


# Fields that do nothing for these prompts and this model by themselves, in plain generate either.
WITHOUT_EFFECT = {"forced_bos_token_id", "bos_token_id", "remove_invalid_values", "use_cache", "disable_compile"}
WITHOUT_EFFECT |= {"output_logits", "renormalize_logits"}
ELSEWHERE = {"output_attentions", "output_hidden_states"}
"""Tested by themselves below."""


@pytest.fixture
def engine() -> Engine:
    """Exact on a tiny llama; its writer's prompt is not held yet."""
    made = engine_of(policy=Exact())
    two_agents(made)
    return made


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


@pytest.mark.parametrize("name", sorted((FIELDS | HANDED_ON) - ELSEWHERE))
def test_a_handed_on_argument_gives_what_plain_generate_gives(engine: Engine, name: str) -> None:
    writer = engine.agents["writer"]
    prompt = writer.prompt(task=TASK)
    options = {"do_sample": False, **cases(engine)[name]}
    length = None if name == "max_new_tokens" else NEW
    if "generation_config" in options:
        del options["do_sample"]
    torch.manual_seed(7)
    expected = plain(engine, prompt, **options, **({"max_new_tokens": length} if length else {}))
    torch.manual_seed(7)
    sampled = name not in ("do_sample", "streamer") and "do_sample" in cases(engine)[name]
    usual = sequences(plain(engine, prompt, max_new_tokens=NEW, do_sample=sampled))
    assert torch.equal(sequences(expected), usual) == (name in WITHOUT_EFFECT)
    for held in (0, len(prompt) - 1):
        given = dict(options)
        if name == "stop_strings":
            del given["tokenizer"]  # kvcomm has it
        if name == "streamer":
            given["streamer"] = Collect()
        torch.manual_seed(7)
        reply = writer.generate(task=TASK, max_new_tokens=length, options=given)
        assert reply.usage.exact == held
        assert torch.equal(sequences(reply.output), sequences(expected))
        for tensors in ("scores", "logits"):
            if getattr(expected, tensors, None) is not None:
                mine, theirs = (torch.stack(getattr(out, tensors)) for out in (reply.output, expected))
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        if name == "streamer":
            assert given["streamer"].pieces == options["streamer"].pieces and given["streamer"].ended == 1
        writer.study(task=TASK)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_states_and_weights_only_where_all_tokens_are_computed(name: str) -> None:
    engine = engine_of(policy=Exact())
    if name == "output_attentions":
        engine.model.set_attn_implementation("eager")
        engine = Engine(engine.model, engine.tokenizer, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task=TASK)
    options = {**GREEDY, name: True, "return_dict_in_generate": True}
    with pytest.raises(InvalidInput, match=rf"{name}=True.*policy=Dense\(\)"):
        writer.generate(task=TASK, options=options)
    kind = name.removeprefix("output_")
    for extra in ({}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(3)
        expected = getattr(plain(engine, prompt, max_new_tokens=4, **options | extra), kind)
        torch.manual_seed(3)
        reply = writer.generate(task=TASK, max_new_tokens=4, options=options | extra, policy=Dense())
        found = getattr(reply.output, kind)
        assert len(found) == len(expected) == 4
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_attention_weights_that_the_model_does_not_keep_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match="output_attentions=True: attention 'sdpa' keeps no weights"):
        engine.agents["writer"].generate(task=TASK, policy=Dense(), options={"output_attentions": True})


def valued(name: str) -> Any:
    """A value that asks for something."""
    several = {"num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "assistant_ensemble_weight": 0.5}
    return {**several, "cache_implementation": "static", "compile_config": CompileConfig()}.get(name, 3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_argument_is_refused_by_name_in_each_place(engine: Engine, name: str) -> None:
    writer, before = engine.agents["writer"], state(engine)
    with pytest.raises(InvalidInput, match=f"^{name}="):
        writer.generate(task=TASK, options={name: valued(name)})
    if name in vars(GenerationConfig()):
        config = GenerationConfig()
        setattr(config, name, valued(name))
        with pytest.raises(InvalidInput, match=rf"^generation_config\.{name}="):
            writer.generate(task=TASK, options={"generation_config": config})
        setattr(engine.model.generation_config, name, valued(name))
        try:  # refused, or without effect on the tokens
            greedy = writer.generate(task=TASK, max_new_tokens=NEW, options=GREEDY).token_ids
        except InvalidInput as error:
            assert str(error).startswith(f"model.generation_config.{name}=")
        else:
            setattr(engine.model.generation_config, name, None)
            assert greedy == answer(engine, writer.prompt(task=TASK), NEW)
            return
    assert state(engine) == before


@pytest.mark.parametrize("name", ["token_type_ids", "logits_to_keep", "temprature", "output_router_logits"])
def test_an_argument_that_nobody_knows_is_refused(engine: Engine, name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, 1)
    for options in ({name: 1}, {"generation_config": config}):
        with pytest.raises(InvalidInput, match=f"{name}=1 is no argument"):
            engine.agents["writer"].generate(task=TASK, options=options)


def test_a_field_of_a_newer_transformers_is_refused_wherever_it_is_set(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.model.generation_config.warp_drive = 9  # type: ignore[union-attr]
    writer = engine.agents["writer"]
    with pytest.raises(InvalidInput, match="warp_drive=9 is no argument"):
        writer.generate(task=TASK, options={"warp_drive": 9})
    # In the model's own config an entry that transformers does not know does nothing; one that it knows does.
    assert writer.generate(task=TASK, max_new_tokens=2, options=GREEDY).text
    monkeypatch.setattr(GenerationConfig, "warp_drive", None, raising=False)
    with pytest.raises(InvalidInput, match=r"model\.generation_config\.warp_drive=9"):
        writer.generate(task=TASK, max_new_tokens=2, options=GREEDY)


def installed() -> set[str]:
    """Every name that the installed transformers' generate gives a meaning to."""
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return arguments | fields | UNLISTED | FORWARD


def test_every_name_of_the_installed_transformers_is_classified() -> None:
    tables = [FIELDS, HANDED_ON, set(REFUSED) - ENGINES, METADATA]
    assert set().union(*tables) == installed()
    assert sum(map(len, tables)) == len(installed()), "a name stands in two tables"
    assert set(WITH_A_FILLED_CACHE) <= FIELDS | set(REFUSED)


def test_the_table_in_the_docs_is_the_one_in_the_code() -> None:
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in DOC.read_text().splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 3 and row[1] in ("supported", "refused")}
    assert {name for name, row in table.items() if row[0] == "supported"} == FIELDS | HANDED_ON
    assert {name: row[1] for name, row in table.items() if row[0] == "refused"} == {
        name: why for name, why in REFUSED.items() if name not in ENGINES
    }
    here = Path(__file__).read_text()
    for name, (verdict, said) in table.items():
        if verdict == "supported":
            assert f"def {said}(" in here, name
            assert (name in ELSEWHERE) == (said == test_states_and_weights_only_where_all_tokens_are_computed.__name__)


def test_a_generation_config_of_the_callers_is_the_models_only_where_it_says_nothing(engine: Engine) -> None:
    writer = engine.agents["writer"]
    own: Any = engine.model.generation_config
    own.do_sample, own.top_k, own.max_new_tokens = True, 3, 5
    prompt = writer.prompt(task=TASK)
    for given in ({}, {"generation_config": GenerationConfig(do_sample=False)}, {"max_new_tokens": 2}):
        torch.manual_seed(1)
        expected = plain(engine, prompt, **given)
        torch.manual_seed(1)
        length = given.get("max_new_tokens")
        options = {name: value for name, value in given.items() if name != "max_new_tokens"}
        assert torch.equal(writer.generate(task=TASK, max_new_tokens=length, options=options).output, expected)


def test_the_default_number_of_new_tokens_fits_the_models_length(engine: Engine) -> None:
    from kvcomm import Segment
    from kvcomm.reuse.prompt import Part, Prompt
    from tests.tiny_models import MAX_POSITIONS

    for length, expected in ((MAX_POSITIONS - 9, 9), (MAX_POSITIONS - 300, 256)):
        prompt = Prompt((Part(Segment((9,) * length), "x/#0"),))
        reply = engine.generate(prompt, stopping_criteria=[StopAt(length + 10)], **GREEDY)
        assert len(reply.token_ids) == min(expected, 10)
    full = Prompt((Part(Segment((9,) * MAX_POSITIONS), "x/#0"),))
    with pytest.raises(InvalidInput, match=f"{MAX_POSITIONS} positions"):
        engine.generate(full, **GREEDY)


def test_streaming_what_cannot_be_streamed_is_refused(engine: Engine) -> None:
    writer, before = engine.agents["writer"], state(engine)
    with pytest.raises(InvalidInput, match="streamer=.* with num_beams above 1"):
        writer.generate(task=TASK, options={"streamer": Collect(), "num_beams": 2})
    text = TextIteratorStreamer(engine.tokenizer)
    with pytest.raises(InvalidInput, match="TextIteratorStreamer takes one sequence, this call generates 2"):
        writer.generate(task=TASK, options={"streamer": text, "do_sample": True, "num_return_sequences": 2})
    assert state(engine) == before
