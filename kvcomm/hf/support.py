"""Which transformers models can be reused, decided by what they are and proven by what they compute."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcomm import rope
from kvcomm.errors import UnsupportedModel
from kvcomm.hf import attention
from kvcomm.hf.latent import check_latents, layout_of
from kvcomm.rope import RopeSpec

FULL, SLIDING = "full_attention", "sliding_attention"
_ATTENTION = ("sdpa", "eager")
_UNAPPLIED_WINDOW = ("moshi",)
# Near enough that a wrong pairing or a missing rotation cannot wrap around; the far probe shows a wrong frequency.
_PROBE_SHIFT = 37


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes its cache; newer transformers call it ``cache``."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in names), "past_key_values")


def check_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for what is no transformers model itself."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"{type(model).__name__} wraps a transformers model, or is none: pass the model inside (for PEFT "
            "get_base_model(), the adapter active in it)"
        )


def text_config(model: PreTrainedModel) -> Any:
    """The configuration that describes the decoder, or UnsupportedModel with the missing part's name."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder: cross-attention KV depends on another text")
    config = config.get_text_config(decoder=True)
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    kinds = set(named) - {FULL, SLIDING, "attention"}
    state = any(
        getattr(config, field, None) for field in ("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel")
    )
    if kinds or state:
        what = ", ".join(sorted(kinds)) or "state-space layers"
        raise UnsupportedModel(
            f"{name} has layers of kind {what}: only full and sliding-window attention keeps KV that can be cut into "
            "segments and masked at chosen positions"
        )
    for chooses in ("keep_window_size", "index_topk"):
        if getattr(config, chooses, None):
            raise UnsupportedModel(f"{name} chooses what to attend to by content ({chooses}): not handled")
    if config.model_type in _UNAPPLIED_WINDOW and getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"{name} names a sliding window that its attention does not apply: not handled")
    if getattr(config, "attn_temperature_tuning", None):
        raise UnsupportedModel(
            f"{name} scales queries by how many tokens its cache holds (attn_temperature_tuning): a pass over chosen "
            "positions would scale them wrongly"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares KV between layers (num_kv_shared_layers): not handled")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (*_ATTENTION, attention.NAME):  # the latter: sdpa, while another thread runs a pass
        raise UnsupportedModel(
            f"attention {implementation!r} cannot recompute chosen positions under a mask; load the model with "
            f"attn_implementation='sdpa' (or one of {', '.join(_ATTENTION)})"
        )
    return config


def check_plain(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a compiled model and for weights that are no plain tensors.

    A graph compiled for one shape of cache is compiled again for every pass over chosen positions. Tensors of a class
    of their own (torchao, bitsandbytes) have neither bytes that a fingerprint could be made of nor a place in memory
    that shows a change.
    """
    name = type(model).__name__
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None or _is_compiled(module.forward):
            raise UnsupportedModel(
                f"{name} is compiled ({path or 'the model itself'}, torch.compile): passes over chosen positions would "
                "compile anew for each shape; pass the model as it was before"
            )
    for path, parameter in model.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            raise UnsupportedModel(
                f"{name} keeps {path} as {type(parameter).__name__}, a quantised tensor: not handled; load the model "
                "dequantised (for GGUF GgufConfig(dequantize=True)), or in float16 or bfloat16"
            )


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile made it; torch.compiler.disable leaves the same trace, and another."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """``full_attention`` or ``sliding_attention`` for each layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(str(kind) for kind in kinds)[: int(config.num_hidden_layers)]
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (SLIDING if sliding else FULL,) * int(config.num_hidden_layers)


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Width of each layer's sliding window in tokens, or None."""
    return tuple(
        int(config.sliding_window) if kind == SLIDING and config.sliding_window else None
        for kind in layer_kinds(config)
    )


@torch.inference_mode()
def probe_keys(model: PreTrainedModel, position: int) -> torch.Tensor:
    """Keys of one token alone at ``position``, [n_layers, n_kv_heads, 1, head_dim].

    A lone token attends to itself only, so its hidden states are the same at every position and its keys differ by
    the rotation alone, in every layer.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    inputs = {
        "input_ids": torch.tensor([[1]], device=model.device),
        "position_ids": torch.tensor([[position]], device=model.device),
        cache_argument(model): cache,
    }
    try:
        model(**inputs, use_cache=True)
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run a single token with a cache: {error}") from error
    name, layout = type(model).__name__, layout_of(model.config.get_text_config(decoder=True))
    keys, shapes = [], set()
    for layer in cache.layers:
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if k is None or v is None:
            raise UnsupportedModel(f"{name} has a layer that caches no keys and values")
        check_latents(name, layout, k, v)
        packed = layout.pack(k, v)
        keys.append(packed[0])
        shapes |= {tuple(part.shape) for part in packed}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{name} caches differently shaped KV in its layers: {sorted(shapes)}")
    found = torch.cat(keys)
    if not bool(torch.isfinite(found).all()):
        raise UnsupportedModel(
            f"{type(model).__name__} gives NaN or infinity for a single token: its weights are broken"
        )
    return found


def proven_rope(model: PreTrainedModel, config: Any) -> RopeSpec:
    """The model's rotary parameters, checked against keys that the model itself computes near and far.

    Raises:
        UnsupportedModel: the rope type is refused by name, or no known reading of it reproduces the model's keys
            (learned or absolute positions, an unknown pairing, rotary buffers rounded by ``model.to(dtype)``).
    """
    at_zero = probe_keys(model, 0)
    tolerance = 1e-4 if at_zero.dtype == torch.float32 else 3e-2
    errors = {}
    for interleaved in (False, True):
        spec = RopeSpec.from_config(config, interleaved=interleaved)
        far = min(int(config.max_position_embeddings), spec.limit) - 1
        errors[interleaved] = max(
            _moving_error(at_zero, probe_keys(model, shift), shift, spec) for shift in (min(_PROBE_SHIFT, far), far)
        )
        if errors[interleaved] < tolerance:
            return spec
    raise UnsupportedModel(
        f"moving keys of {type(model).__name__} differs from the model's own by {min(errors.values()):.1e} (limit "
        f"{tolerance:.0e}): its positions are not a rotation that kvcomm knows, or model.to(dtype) has rounded its "
        "rotary buffers; load it with from_pretrained(..., dtype=...) instead"
    )


def _moving_error(at_zero: torch.Tensor, shifted: torch.Tensor, shift: int, spec: RopeSpec) -> float:
    """Relative error of moving keys from position 0 to ``shift``; both [layers, kv heads, 1, head_dim]."""

    def at(position: int) -> torch.Tensor:
        return torch.tensor([position], dtype=torch.int64, device=at_zero.device)

    moved = rope.rotate(rope.unrotate(at_zero.float(), at(0), spec), at(shift), spec)
    return float((moved - shifted.float()).norm() / shifted.float().norm().clamp_min(1e-30))
