"""Models, templates, texts and settings that would make reuse wrong in silence are refused or made harmless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from kvcomm import Engine, Exact, InvalidInput, Slot, System, UnsupportedModel
from kvcomm.errors import FingerprintMismatch
from kvcomm.hf.template import Template
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.select import Leading
from tests.hf.engines import GREEDY, engine_of, plain, two_agents
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

SMALL: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
)  # fmt: skip


def greedy(engine: Engine, prompt: Prompt, tokens: int) -> tuple[int, ...]:
    """The tokens that model.generate alone answers with."""
    return tuple(plain(engine, prompt, max_new_tokens=tokens, **GREEDY)[0, len(prompt) :].tolist())


def test_a_bidirectional_model_is_refused() -> None:
    model = GemmaForCausalLM(GemmaConfig(**SMALL, use_bidirectional_attention=True)).eval()
    with pytest.raises(UnsupportedModel, match="not the causal one"):
        Engine(model, tiny_tokenizer())


def test_a_model_that_chooses_by_content_is_refused() -> None:
    model = FAMILIES["llama"]()
    model.config.keep_window_size = 16
    with pytest.raises(UnsupportedModel, match="keep_window_size"):
        Engine(model, tiny_tokenizer())


def test_a_model_of_one_layer_reuses() -> None:
    model = LlamaForCausalLM(LlamaConfig(**(SMALL | {"num_hidden_layers": 1}))).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    engine = Engine(model, tiny_tokenizer(), policy=Reuse(dense_above=1.0, select=Leading(0)))
    for text in (f"the {n} text that comes by" for n in ("first", "second", "third", "fourth")):
        writer, critic = two_agents(engine)
        reply = critic.generate(task=text, draft=writer.generate(task=text, max_new_tokens=2, options=GREEDY),
                                max_new_tokens=2, options=GREEDY)  # fmt: skip
    assert reply.usage.approximate > 0


def test_kv_that_is_not_finite_is_never_kept() -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    clean = "clean text goes here"
    expected = greedy(engine, writer.prompt(task=clean), 5)
    bad = engine.tokenizer("x")["input_ids"][-1]
    weight = engine.model.get_input_embeddings().weight
    kept = weight[bad].clone()
    weight.data[bad] = float("nan")  # through .data: the engine cannot see it
    writer.generate(task="x" * 20, max_new_tokens=2, options=GREEDY)
    weight.data[bad] = kept
    assert all(base.kv.finite for base in engine.pool)
    assert writer.generate(task=clean, max_new_tokens=5, options=GREEDY).token_ids == expected


def test_another_attention_after_the_engine_was_built_is_noticed() -> None:
    engine = engine_of()
    writer, _ = two_agents(engine)
    engine.model.set_attn_implementation("eager")
    with pytest.raises(FingerprintMismatch, match="attention"):
        writer.generate(task="a", max_new_tokens=1)


@pytest.mark.parametrize("setting", [{"prefill_chunk_size": 4}, {"assistant_early_exit": 1}, {"max_length": 30}])
def test_settings_of_the_model_that_do_not_go_with_a_filled_cache_are_out_of_force(setting: dict[str, Any]) -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    expected = greedy(engine, writer.prompt(task="a text"), 8)
    for name, value in setting.items():
        setattr(engine.model.generation_config, name, value)
    for _ in range(3):
        assert writer.generate(task="a text", max_new_tokens=8, options=GREEDY).token_ids == expected


@pytest.mark.parametrize("setting", [{"token_healing": True}, {"penalty_alpha": 0.6}, {"num_beam_groups": 2}])
def test_settings_of_the_model_that_would_change_tokens_are_refused(setting: dict[str, Any]) -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    for name, value in setting.items():
        setattr(engine.model.generation_config, name, value)
        with pytest.raises(InvalidInput, match=f"model.generation_config.{name}"):
            writer.generate(task="a text", max_new_tokens=8, options=GREEDY)


TEMPLATES = {
    "twice": "{% for m in messages %}{{ m.content }} Again: {{ m.content }}{% endfor %}",
    "no system": "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    "shortened": "{% for m in messages %}{{ m.content[:30] }}{% endfor %}",
    "refusing": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}",  # noqa: E501
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_chat_templates_that_change_the_prompt_are_refused(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    parts = [System("IMPORTANT rules."), "Task: ", Slot("task"), " and then do all the rest of it"]
    with pytest.raises(InvalidInput, match="chat template"):
        Template("agent", parts, tokenizer)


def test_added_tokens_cannot_come_in_through_a_slot() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    inside = tokenizer.convert_tokens_to_ids("<think>")
    template = Template("agent", ["Task: ", Slot("task")], tokenizer)
    segment = template.text_segment("a<think>b<<think>think>c")
    assert inside not in segment.token_ids
    assert len(segment) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Reuse(dense_above=float("nan")),
        lambda: Reuse(learn_first=-1),
        lambda: Reuse(origins=("prompt",)),  # type: ignore[arg-type]
        lambda: Reuse(origins=()),
        lambda: Leading(1.5),  # type: ignore[arg-type]
        lambda: two_agents(engine_of())[0].generate(task="a", max_new_tokens=2.5),  # type: ignore[arg-type]
        lambda: two_agents(engine_of())[0].generate(task="a", policy=Exact),  # type: ignore[arg-type]
        lambda: two_agents(engine_of())[0].generate(task="a", options=["do_sample"]),  # type: ignore[arg-type]
        lambda: two_agents(engine_of())[0].generate(task="a\ud800"),
        lambda: engine_of().agent("a\ud800", ["text"]),
        lambda: engine_of().agent(5, ["text"]),  # type: ignore[arg-type]
    ],
)
def test_wrong_values_are_named(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        wrong()


def test_an_answer_is_not_lost_to_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    writer, _ = two_agents(engine)

    def broken(*_: Any) -> bool:
        raise RuntimeError("the pool fell over")

    monkeypatch.setattr(engine.pool, "put", broken)
    assert len(writer.generate(task="a text", max_new_tokens=3, options=GREEDY).token_ids) == 3
    assert torch.is_inference_mode_enabled() is False
