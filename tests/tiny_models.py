"""Tiny random models of real transformers classes, the same at every call: no file and no network is needed.

Weights are scaled so that activations are of order one in every layer: attention is neither flat nor one-hot, and a
wrong position, head or layer shows in the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

MAX_POSITIONS = 4096
SWITCH_LENGTH = 1024
"""Where the LongRoPE families turn from short to long factors."""

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

INTERLEAVED = frozenset({"cohere", "glm", "glm4", "llama4", "deepseek_v2"})
"""Families whose rotary pairs are neighbours (2i, 2i + 1) instead of halves."""


def _build(name: str, *, config_name: str | None = None, **overrides: Any) -> PreTrainedModel:
    config = getattr(transformers, config_name or f"{name}Config")(**{**_COMMON, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:  # biases and norms: near what the class starts them with
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[-1])))
        embedding = model.get_input_embeddings()  # some scale what they hold
        embedding.weight.div_(embedding(torch.arange(config.vocab_size)).std())
    return model.eval()


def _llama(**rope: Any) -> PreTrainedModel:
    return _build("Llama", rope_parameters={"rope_theta": 10000.0, **rope})


def _longrope_factors(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
    }


def _smollm3() -> PreTrainedModel:
    return _build("SmolLM3", num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1])


def _eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def _gemma2() -> PreTrainedModel:
    """In eager attention, the only one in which transformers caps its scores."""
    return _eager(
        _build(
            "Gemma2",
            head_dim=16,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=32,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        )
    )


def _gpt_oss() -> PreTrainedModel:
    return _build(
        "GptOss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=32,
    )


def _llama4() -> PreTrainedModel:
    """Without its chunks and its queries' temperature, which are refused: three layers with rope, one without."""
    return _build(
        "Llama4",
        config_name="Llama4TextConfig",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        layer_types=["full_attention"] * 4,
        no_rope_layers=[1, 1, 0, 1],
        attn_temperature_tuning=False,
    )


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
"""Widths of latent attention, no two of which are equal."""
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_routed_experts": 4}


def _deepseek_v3(**rope: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return _build("DeepseekV3", **_LATENT, **_EXPERTS, first_k_dense_replace=1, rope_parameters=rope)


def _gemma3() -> PreTrainedModel:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return _build(
        "Gemma3",
        config_name="Gemma3TextConfig",
        num_hidden_layers=4,
        head_dim=16,
        layer_types=types,
        sliding_window=32,
        rope_parameters=rope,
        query_pre_attn_scalar=16,
    )


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-linear": lambda: _llama(rope_type="linear", factor=4.0),
    "llama-llama3": lambda: _llama(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    ),
    "llama-yarn": lambda: _llama(rope_type="yarn", factor=8.0, original_max_position_embeddings=512),
    "llama-longrope": lambda: _llama(
        **_longrope_factors(8), factor=4.0, original_max_position_embeddings=SWITCH_LENGTH
    ),
    "llama-proportional": lambda: _llama(rope_type="proportional", partial_rotary_factor=0.25),
    "qwen2": lambda: _build("Qwen2", rope_parameters={"rope_theta": 1000000.0}),
    "qwen3": lambda: _build("Qwen3", head_dim=24),
    "mistral": lambda: _build("Mistral", sliding_window=32),
    "phi3": lambda: _build(
        "Phi3",
        original_max_position_embeddings=SWITCH_LENGTH,
        partial_rotary_factor=0.75,
        rope_parameters={"rope_theta": 10000.0, **_longrope_factors(6)},
    ),
    "gemma3": _gemma3,
    "gpt_neox": lambda: _build("GPTNeoX", rotary_pct=0.25, num_key_value_heads=4),
    "cohere": lambda: _build("Cohere", logit_scale=1.0),
    "glm": lambda: _build("Glm", head_dim=16),
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "mixtral": lambda: _build("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: _build(
        "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "olmo": lambda: _build("Olmo"),
    "olmo2": lambda: _build("Olmo2"),
    "glm4": lambda: _build("Glm4", head_dim=16),
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek_v2": lambda: _build("DeepseekV2", **_LATENT, **_EXPERTS, first_k_dense_replace=1),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3-yarn": lambda: _deepseek_v3(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.5
    ),
    "minicpm3": lambda: _build("MiniCPM3", **_LATENT),
}

OWN_ATTENTION = frozenset({"gemma2", "gpt_oss"})
"""Families whose attention is more than a softmax (caps, sinks): passes over chosen positions run the model's own."""
WITHOUT_ROPE = {"smollm3": (2,), "llama4": (2,)}
"""Layers without rotary positions."""
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v3-yarn", "minicpm3"})
"""Families of multi-head latent attention: their cache holds a latent and a rotary key."""
KNOWN_AS = {
    "llama": "Llama 2, Llama 3, SmolLM2, TinyLlama and whatever else has this class",
    "llama-linear": "position interpolation",
    "llama-llama3": "Llama 3.1 and newer",
    "llama-yarn": "YaRN",
    "llama-longrope": "LongRoPE",
    "llama-proportional": "proportional, partial rotary",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mistral": "Mistral 7B",
    "phi3": "Phi-3, Phi-4-mini",
    "gemma3": "Gemma 3, text",
    "gpt_neox": "Pythia, GPT-NeoX",
    "cohere": "Command R",
    "glm": "GLM-4-9B-chat",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma 2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "glm4": "GLM-4-0414",
    "gpt_oss": "gpt-oss, its sinks kept",
    "llama4": "layers of Llama 4's shape; its chunks and temperature are refused",
    "deepseek_v2": "DeepSeek-V2, latent attention",
    "deepseek_v3": "DeepSeek-V3 and R1, latent attention",
    "deepseek_v3-yarn": "the same with YaRN, as they are published",
    "minicpm3": "MiniCPM3, latent attention",
}
"""What people know each family as."""


def as_held(keys: torch.Tensor, values: torch.Tensor, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model's own cache holds, in the order in which kvcomm holds it: a latent behind its rotary key, halved."""
    if not getattr(model.config, "kv_lora_rank", None):
        return keys, values
    first, second = torch.cat([values, keys], dim=-1).chunk(2, dim=-1)
    return first, second


def as_cached(keys: torch.Tensor, values: torch.Tensor, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The other way round."""
    if not getattr(model.config, "kv_lora_rank", None):
        return keys, values
    rotary, latent = torch.cat([keys, values], dim=-1).split(
        [model.config.qk_rope_head_dim, model.config.kv_lora_rank], dim=-1
    )
    return latent, rotary
