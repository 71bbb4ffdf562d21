"""Latent attention: what its cache holds lies in kvcomm's keys and values whole, and is generated from in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcomm import Dense, Engine, Exact, Fast
from kvcomm.errors import UnsupportedModel
from kvcomm.hf.latent import Latent, Plain, check_latents, layout_of
from kvcomm.reuse.healing import Verified
from tests.hf.engines import GREEDY, answer, engine_of, plain, two_agents
from tests.reuse.scene import backend_of, tokens
from tests.tiny_models import FAMILIES, LATENT, as_held


@pytest.mark.parametrize("latent, rotary", [(40, 8), (8, 8), (512, 64), (6, 4)])
def test_nothing_is_lost_between_the_two_forms(latent: int, rotary: int) -> None:
    layout = Latent(latent, rotary)
    cached = torch.randn(2, 1, 5, latent), torch.randn(2, 1, 5, rotary)
    keys, values = layout.pack(*cached)
    assert keys.shape == values.shape == (2, 1, 5, (latent + rotary) // 2)
    assert torch.equal(keys[..., :rotary], cached[1])
    assert all(map(torch.equal, layout.unpack(keys, values), cached))


@pytest.mark.parametrize("family", sorted(LATENT))
def test_a_tokens_kv_is_its_latent_and_one_rotary_key(family: str) -> None:
    """kvcomm holds as many numbers as transformers' own cache, far fewer than the heads' keys and values."""
    backend, ids = backend_of(family), tokens(20, 3)
    cache = DynamicCache()
    with torch.inference_mode():
        backend.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    buffer = backend.buffer(20)
    backend.forward(buffer, ids, range(20), 0)
    for index, layer in enumerate(cache.layers):
        keys, values = as_held(layer.keys, layer.values, backend.model)  # type: ignore[arg-type]
        torch.testing.assert_close(buffer.keys[index], keys[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(buffer.values[index], values[0], rtol=1e-4, atol=1e-5)
    f = backend.spec.fingerprint
    assert f.bytes_per_token == f.n_layers * (40 + 8) * 4


@pytest.mark.parametrize("family", sorted(LATENT))
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3, "num_return_sequences": 2, **GREEDY},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_exact_reuse_generates_what_the_model_does(family: str, options: dict[str, Any]) -> None:
    engine = engine_of(family, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task="the agent must write the code")
    engine.generate(prompt, max_new_tokens=1, **GREEDY)
    torch.manual_seed(5)
    reply = engine.generate(prompt, max_new_tokens=8, **options)
    assert reply.usage.exact > 0
    torch.manual_seed(5)
    assert torch.equal(reply.output, plain(engine, prompt, max_new_tokens=8, **options))


def test_an_answer_is_reused_by_the_next_agent_and_survives_a_file(tmp_path: Path) -> None:
    engine = engine_of("deepseek_v3", policy=Fast(learn_first=0, dense_above=1.0))
    writer, critic = two_agents(engine)
    task = "the agent must write the code for the task that the user gave"
    draft = writer.generate(task=task, max_new_tokens=12, options=GREEDY)
    reply = critic.generate(draft=draft, task=task, max_new_tokens=4, options=GREEDY)
    assert reply.usage.approximate >= len(draft.segment)
    engine.save(tmp_path / "pool")
    other = Engine(engine.model, engine.tokenizer, policy=engine.policy, learn=False)
    assert other.load(tmp_path / "pool") > 0
    again = two_agents(other)[1].generate(draft=draft, task=task, max_new_tokens=4, options=GREEDY)
    assert again.usage.cached_tokens >= reply.usage.approximate


def test_what_is_recomputed_whole_is_the_dense_answer() -> None:
    engine = engine_of("deepseek_v2", policy=Dense())
    prompt = two_agents(engine)[0].prompt(task="the agent must write the code")
    assert engine.generate(prompt, max_new_tokens=8, **GREEDY).token_ids == answer(engine, prompt, 8)


def test_verified_gives_the_dense_answer() -> None:
    engine = engine_of("deepseek_v3", policy=Verified(Fast(learn_first=0, dense_above=1.0), piece=8))
    writer, critic = two_agents(engine)
    task = "the agent must write the code for the task that the user gave"
    draft = writer.generate(task=task, max_new_tokens=12, options=GREEDY)
    prompt = critic.prompt(draft=draft, task=task)
    reply = engine.generate(prompt, max_new_tokens=12, **GREEDY)
    assert reply.usage.approximate > 0
    assert reply.token_ids == answer(engine, prompt, 12)


def test_a_cache_of_another_form_is_refused() -> None:
    heads = torch.zeros(1, 4, 1, 24), torch.zeros(1, 4, 1, 12)
    with pytest.raises(UnsupportedModel, match="caches 4 heads of 24 and 4 of 12, not one latent of 40"):
        check_latents("Model", Latent(40, 8), *heads)
    check_latents("Model", Plain(), *heads)


def test_other_models_hold_what_they_cache() -> None:
    assert layout_of(FAMILIES["llama"]().config) == Plain()
    assert layout_of(FAMILIES["deepseek_v3"]().config) == Latent(40, 8)
