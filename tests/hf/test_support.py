"""Models that cannot be reused are refused by the name of what is missing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvcomm.errors import InvalidInput, UnsupportedModel
from kvcomm.hf.backend import HFBackend
from kvcomm.hf.support import cache_argument, layer_kinds, layer_windows
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
_TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_UNCHUNKED = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]}


def tiny(name: str, model: str | None = None, config: str | None = None, **settings: Any) -> PreTrainedModel:
    made = getattr(transformers, f"{config or name}Config")(**{**_TINY, **settings})
    built: PreTrainedModel = getattr(transformers, model or f"{name}ForCausalLM")(made)
    return built.eval()


REFUSED: dict[str, tuple[Any, str]] = {
    "encoder-decoder": (
        lambda: tiny("T5", "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "latents narrower than their rotary key": (
        lambda: tiny(
            "DeepseekV3",
            **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4},
        ),
        "multi-head latent attention with kv_lora_rank=8 and qk_rope_head_dim=16",
    ),
    "state space": (lambda: tiny("Mamba"), "linear_attention"),
    "hybrid": (
        lambda: tiny("Jamba", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
        "linear_attention",
    ),
    "chunked": (
        lambda: tiny("Llama4", config="Llama4Text", head_dim=16, num_local_experts=2),
        "chunked_attention",
    ),
    "temperature by length": (
        lambda: tiny("Llama4", config="Llama4Text", head_dim=16, num_local_experts=2, **_UNCHUNKED),
        "attn_temperature_tuning",
    ),
    "recurrent": (lambda: tiny("RecurrentGemma", block_types=["recurrent", "attention"]), "layers of kind recurrent"),
    "learned positions": (
        lambda: tiny("GPT2", "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4),
        "no rope_parameters",
    ),
    "alibi": (lambda: tiny("Falcon", alibi=True), "not a rotation that kvcomm knows"),
    "dynamic ntk": (
        lambda: tiny("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "dynamic NTK",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=said):
        HFBackend(build(), TOKENIZER)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_rotary_buffers_are_refused(dtype: torch.dtype) -> None:
    """model.to(dtype) rounds the frequencies; from_pretrained(dtype=...) does not."""
    model = FAMILIES["llama"]()
    model.to(dtype)
    with pytest.raises(UnsupportedModel, match="from_pretrained"):
        HFBackend(model, TOKENIZER)


def test_training_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"call model.eval\(\) first"):
        HFBackend(FAMILIES["llama"]().train(), TOKENIZER)


def test_a_tokenizer_with_more_ids_is_of_another_model() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<extra-{n}>" for n in range(30)])
    with pytest.raises(InvalidInput, match="139 tokens but the model embeds 128"):
        HFBackend(FAMILIES["llama"](), tokenizer)


def test_a_model_in_several_places_is_refused() -> None:
    model = FAMILIES["llama"]()
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModel, match="load it on one device"):
        HFBackend(model, TOKENIZER)


def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Sequential wraps"):
        HFBackend(torch.nn.Sequential(FAMILIES["llama"]()).eval(), TOKENIZER)  # type: ignore[arg-type]


def test_attention_without_masks_is_refused() -> None:
    model = FAMILIES["llama"]()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        HFBackend(model, TOKENIZER)


def test_a_compiled_model_is_refused() -> None:
    """As a whole, in one layer, or its forward alone; nothing is compiled before it is called."""
    whole, layer, forward = (FAMILIES["llama"]() for _ in range(3))
    whole.compile()
    layer.model.layers[1].compile()  # type: ignore[union-attr]
    forward.forward = torch.compile(forward.forward)
    for model, where in ((whole, "the model itself"), (layer, "model.layers.1"), (forward, "the model itself")):
        with pytest.raises(UnsupportedModel, match=f"is compiled .{where}"):
            HFBackend(model, TOKENIZER)
    with pytest.raises(UnsupportedModel, match="OptimizedModule wraps"):
        HFBackend(torch.compile(FAMILIES["llama"]()), TOKENIZER)  # type: ignore[arg-type]


class Quantised(torch.nn.Parameter):
    """As bitsandbytes and torchao keep weights: a class of its own."""


def test_quantised_tensors_are_refused_by_name() -> None:
    model = FAMILIES["llama"]()
    layer: Any = model.model.layers[0]
    layer.mlp.up_proj.weight = Quantised(layer.mlp.up_proj.weight.data)
    with pytest.raises(UnsupportedModel, match="layers.0.mlp.up_proj.weight as Quantised.*dequantise"):
        HFBackend(model, TOKENIZER)


def test_shared_kv_is_refused() -> None:
    model = FAMILIES["llama"]()
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModel, match="num_kv_shared_layers"):
        HFBackend(model, TOKENIZER)


def test_windows_are_read_for_each_layer() -> None:
    assert layer_windows(FAMILIES["gemma3"]().config) == (32, 32, None, 32)
    assert layer_windows(FAMILIES["mistral"]().config) == (32, 32, 32)
    assert layer_windows(FAMILIES["llama"]().config) == (None, None, None)
    mixed = tiny("Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1).config
    assert layer_windows(mixed) == (None, 16)
    assert layer_kinds(tiny("Qwen2", use_sliding_window=False, sliding_window=16).config) == ("full_attention",) * 2


def test_the_cache_argument_is_found_by_its_name() -> None:
    model = FAMILIES["llama"]()
    assert cache_argument(model) in inspect.signature(model.forward).parameters

    def older(input_ids: torch.Tensor, past_key_values: Any = None) -> None: ...

    def newer(input_ids: torch.Tensor, cache: Any = None) -> None: ...

    model.forward = older
    assert cache_argument(model) == "past_key_values"
    model.forward = newer
    assert cache_argument(model) == "cache"
