"""Passes for selections: the first layers alone, and what chosen queries attend to."""

from __future__ import annotations

import pytest
import torch

from kvcomm.errors import InvalidInput, UnsupportedModel
from kvcomm.reuse.backend import KVBuffer
from tests.tiny_backend import backend_of, tiny_backend
from tests.tiny_models import FAMILIES

TOKENS = 60
IDS = [(11 * n + 5) % 128 for n in range(TOKENS)]
OTHER = [(7 * n + 3) % 128 for n in range(TOKENS)]
POSITIONS = [*range(5, 20), *range(40, 60)]


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "phi3", "deepseek_v3"])
def test_first_layers_write_their_kv_and_no_other(family: str, layers: int) -> None:
    backend = tiny_backend(family)
    whole, first, before = (KVBuffer(backend.spec, TOKENS) for _ in range(3))
    for buffer in (whole, first, before):
        backend.forward(buffer, IDS, range(TOKENS), 0)
    ids = [OTHER[p] for p in POSITIONS]
    backend.forward(whole, ids, POSITIONS, 0)
    backend.forward_first(first, ids, POSITIONS, layers)
    assert first.length == TOKENS
    written = slice(0, layers + 1)
    torch.testing.assert_close(first.keys[written], whole.keys[written])
    torch.testing.assert_close(first.values[written], whole.values[written])
    torch.testing.assert_close(first.keys[layers + 1 :], before.keys[layers + 1 :], rtol=0, atol=0)
    assert not torch.equal(whole.keys[layers], before.keys[layers])
    assert backend.model.config._attn_implementation == "sdpa"


def test_first_layers_of_a_fresh_buffer_leave_it_empty() -> None:
    backend = tiny_backend("llama")
    whole, first = KVBuffer(backend.spec, TOKENS), KVBuffer(backend.spec, TOKENS)
    backend.forward(whole, IDS, range(TOKENS), 0)
    backend.forward_first(first, IDS, range(TOKENS), 1)
    torch.testing.assert_close(first.values[:2], whole.values[:2])
    assert first.length == 0


@pytest.mark.parametrize("layers", [-1, 3])
def test_refuses_layers_that_are_not_there(layers: int) -> None:
    backend = tiny_backend("llama")
    with pytest.raises(InvalidInput, match=f"{layers} first layers of 3"):
        backend.forward_first(KVBuffer(backend.spec, TOKENS), IDS, range(TOKENS), layers)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt_neox", "smollm3", "deepseek_v2"])
def test_attention_is_that_of_the_models_own_weights(family: str) -> None:
    backend = tiny_backend(family)
    buffer = KVBuffer(backend.spec, TOKENS)
    queries = [50, 55, 59]
    backend.forward(buffer, IDS, range(TOKENS), 0)
    kept = buffer.keys.clone()
    seen = backend.attended(buffer, [IDS[p] for p in POSITIONS], POSITIONS, queries)
    torch.testing.assert_close(buffer.keys, kept, rtol=1e-4, atol=1e-4)
    model = FAMILIES[family]()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([IDS]), output_attentions=True).attentions
    want = torch.stack([w[0].mean(0) for w in weights]).mean(0)[queries]
    torch.testing.assert_close(seen, want, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(seen.sum(-1), torch.ones(3))


def test_attention_of_an_eager_model_and_of_a_pass_from_position_0() -> None:
    model = FAMILIES["llama"]()
    model.set_attn_implementation("eager")
    eager, sdpa = backend_of(model), tiny_backend("llama")
    buffers = KVBuffer(eager.spec, TOKENS), KVBuffer(sdpa.spec, TOKENS)
    a = eager.attended(buffers[0], IDS, range(TOKENS), [3, 58])
    b = sdpa.attended(buffers[1], IDS, range(TOKENS), [3, 58])
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(buffers[0].keys, buffers[1].keys, rtol=1e-4, atol=1e-4)
    assert buffers[0].length == buffers[1].length == TOKENS


@pytest.mark.parametrize("queries", [[], [4], [50, 50], [59, 50]])
def test_refuses_queries_outside_the_pass(queries: list[int]) -> None:
    backend = tiny_backend("llama")
    buffer = KVBuffer(backend.spec, TOKENS)
    buffer.length = TOKENS
    with pytest.raises(InvalidInput, match="watched positions"):
        backend.attended(buffer, [OTHER[p] for p in POSITIONS], POSITIONS, queries)


def test_refuses_to_watch_what_sdpa_does_not_show() -> None:
    backend = backend_of(FAMILIES["llama"]())
    backend.grouped = False  # as where softcapping or sinks are asked for; which models do depends on transformers
    with pytest.raises(UnsupportedModel, match="attn_implementation='eager'"):
        backend.attended(KVBuffer(backend.spec, TOKENS), IDS, range(TOKENS), [3])
