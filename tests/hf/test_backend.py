"""HFBackend: what it refuses, what it leaves alone, its digests, and generation that goes on from its cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcomm.errors import FingerprintMismatch, InvalidInput
from kvcomm.hf.backend import HFBackend
from kvcomm.hf.cache import generation_cache
from kvcomm.hf.fingerprint import adapter_digest, tokenizer_digest, weights_digest
from kvcomm.reuse.backend import KVBuffer
from tests.reuse.scene import backend_of, error, filled, tokens
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOLERANCE = 2e-5
"""Relative, float32: the tiny models' matmuls round differently when cut elsewhere."""


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([], "give each token one position"),
        ([4, 5], "give each token one position"),
        ([4, 4, 5], "strictly increasing"),
        ([5, 4, 6], "strictly increasing"),
        ([-1, 0, 1], "0 or more"),
        ([5, 6, 8], "leave a gap"),
        ([7, 8, 9], "leave a gap"),
        ([14, 15, 16], "outside the buffer of 16"),
    ],
)
def test_positions_are_checked(positions: list[int], said: str) -> None:
    backend = backend_of("llama")
    buffer = filled(backend, tokens(6, 1), room=10)
    before = buffer.keys[:, :, :6].clone()
    with pytest.raises(InvalidInput, match=said):
        backend.forward(buffer, [3, 4, 5], positions, logits=1)
    assert buffer.length == 6 and torch.equal(buffer.keys[:, :, :6], before)


def test_forward_touches_only_its_positions() -> None:
    backend = backend_of("gemma3")
    buffer = filled(backend, tokens(50, 1), room=4)
    keys = buffer.keys.clone()
    backend.forward(buffer, [5, 6, 7], [3, 40, 49], logits=0)
    changed = (buffer.keys != keys).any(-1).any(1).any(0)[:50]
    assert changed.nonzero().flatten().tolist() == [3, 40, 49] and buffer.length == 50
    backend.forward(buffer, [8, 9, 9], [49, 50, 51], logits=0)
    assert buffer.length == 52


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_as_many_logits_as_asked(wanted: int) -> None:
    backend = backend_of("llama")
    buffer, ids = KVBuffer(backend.spec, 8), tokens(8, 1)
    got = backend.forward(buffer, ids, range(8), logits=wanted)
    assert got.shape == (wanted, backend.spec.vocab_size) and not got.requires_grad
    if wanted:
        full = backend.forward(KVBuffer(backend.spec, 8), ids, range(8), logits=8)
        assert error(got, full[-wanted:]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "qwen2", "deepseek_v3"])
def test_eager_attention_computes_the_same(family: str) -> None:
    eager = FAMILIES[family]()
    eager.set_attn_implementation("eager")
    backend, ids = HFBackend(eager, TOKENIZER), tokens(70, 1)
    buffer, other = filled(backend, ids), filled(backend_of(family), ids)
    for each in (backend, backend_of(family)):
        each.forward(buffer if each is backend else other, [5, 6, 7], [2, 33, 68], logits=0)
    assert error(buffer.keys, other.keys) < TOLERANCE and error(buffer.values, other.values) < TOLERANCE


@pytest.mark.parametrize("length", [1, 30, 69, 70])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_goes_on_from_the_cache(family: str, length: int) -> None:
    """Sliding layers too, whose window of 32 the prompt of 71 tokens exceeds; the answer is the model's own."""
    backend, ids = backend_of(family), tokens(71, 4)
    prompt = torch.tensor([ids])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "eos_token_id": None, "pad_token_id": 0}
    plain = backend.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    buffer = filled(backend, ids[:length], room=100)
    cache = generation_cache(buffer, backend.layout)
    own = backend.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **options)
    assert torch.equal(own.sequences, plain.sequences)
    assert error(torch.stack(own.logits), torch.stack(plain.logits)) < TOLERANCE
    assert all(layer.in_place and layer.get_seq_length() == 71 + 11 for layer in cache.layers)
    buffer.length = 82
    again = filled(backend, own.sequences[0, :82].tolist())
    assert error(buffer.values[:, :, :82], again.values) < TOLERANCE


def test_generation_leaves_the_room_when_it_is_used_up() -> None:
    backend, ids = backend_of("llama"), tokens(20, 1)
    prompt = torch.tensor([ids])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    cache = generation_cache(filled(backend, ids[:19], room=5), backend.layout)
    own = backend.model.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(own, backend.model.generate(prompt, **options))
    assert not any(layer.in_place for layer in cache.layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loaded_as_it_should_be_works(dtype: torch.dtype, tmp_path: Any) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    model = type(FAMILIES["llama"]()).from_pretrained(tmp_path, dtype=dtype)
    backend = HFBackend(model.eval(), TOKENIZER)
    assert backend.spec.fingerprint.dtype == str(dtype).removeprefix("torch.")
    assert filled(backend, tokens(9, 1)).keys.dtype == dtype


def test_a_model_changed_afterwards_is_noticed() -> None:
    model = FAMILIES["llama"]()
    backend = HFBackend(model, TOKENIZER)
    backend.check_unchanged()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    with pytest.raises(FingerprintMismatch, match="build a new Engine"):
        backend.check_unchanged()
    HFBackend(model, TOKENIZER).check_unchanged()
    moved = HFBackend(model, TOKENIZER)
    model.to(torch.float64)
    with pytest.raises(FingerprintMismatch):
        moved.check_unchanged()
    trained = HFBackend(FAMILIES["llama"](), TOKENIZER)
    trained.model.train()
    with pytest.raises(InvalidInput, match="training mode"):
        trained.check_unchanged()


class Lora:
    """What of a PEFT configuration is read."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)


def adapted(active: Any = "one", disabled: bool = False, **settings: Any) -> Any:
    model = FAMILIES["llama"]()
    layer: Any = model.model.layers[0]
    layer._disable_adapters = disabled
    model.peft_config = {"one": Lora(r=8, **settings), "two": Lora(r=8)}
    layer._active_adapter = active
    return model


def test_adapters_are_part_of_the_fingerprint() -> None:
    """Names, settings that are in no parameter, such as the scaling, and whether they are switched off."""
    bare = adapter_digest(FAMILIES["llama"]())
    assert bare == ""
    found = [
        adapter_digest(adapted(lora_alpha=16)),
        adapter_digest(adapted(lora_alpha=32)),
        adapter_digest(adapted(active=["two"])),
        adapter_digest(adapted(active=["two", "one"])),
        adapter_digest(adapted(disabled=True)),
    ]
    assert len({bare, *found}) == len(found) + 1
    assert adapter_digest(
        adapted(lora_alpha=16, target_modules={"q", "k", "v"}, inference_mode=True)
    ) == adapter_digest(adapted(lora_alpha=16, target_modules={"v", "k", "q"}, inference_mode=False))


def test_an_adapter_switched_afterwards_is_noticed() -> None:
    model = adapted(lora_alpha=16)
    backend = HFBackend(model, TOKENIZER)
    model.model.layers[0]._disable_adapters = True
    with pytest.raises(FingerprintMismatch, match="adapters"):
        backend.check_unchanged()


def test_weights_digest_sees_every_bit_and_name() -> None:
    one, other = FAMILIES["llama"](), FAMILIES["llama"]()
    assert weights_digest(one) == weights_digest(other)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1e-6
    assert weights_digest(one) != weights_digest(other)
    with torch.no_grad():
        other.lm_head.weight.copy_(one.lm_head.weight)
    for kept, persistent in ((False, False), (True, True)):  # GPTQ and AWQ keep weights in saved buffers
        other.register_buffer(f"packed_{persistent}", torch.ones(3, dtype=torch.int32), persistent=persistent)
        assert (weights_digest(one) != weights_digest(other)) == kept
    given = HFBackend(other, TOKENIZER, weights="vouched").spec.fingerprint
    assert given.weights == "vouched"


def test_tokenizer_digest_is_of_what_turns_text_into_ids() -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "abc"], padding=True)  # leaves padding switched on inside
    tokenizer("abcdef", truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before
    assert tokenizer_digest(tiny_tokenizer(chat=False)) == before  # a template is text, seen in the ids it makes
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    assert tokenizer_digest(tokenizer) != before
    slow = SimpleNamespace(get_vocab=lambda: {"a": 0}, special_tokens_map={})
    assert len(tokenizer_digest(slow)) == 64  # type: ignore[arg-type]
