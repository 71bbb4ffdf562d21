"""Keys moved from p to q are the keys that the model computes at q, on real config classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvcomm.rope import RopeSpec, rotate, unrotate
from tests.rope.oracle import TOLERANCES, error, of_model, oracle, rotary_module
from tests.tiny_models import FAMILIES, INTERLEAVED, MAX_POSITIONS, SWITCH_LENGTH, WITHOUT_ROPE, as_held

LAST = MAX_POSITIONS - 1
LONGROPE = {"llama-longrope", "phi3"}
TOKENS = torch.tensor([17, 3, 99, 42, 64, 127, 8, 55])
FROM = torch.tensor([0, 1, 7, 63, 64, 300, 511, 900])
TO = torch.tensor([5, 0, 1000, 1023, 64, 301, 2, 31])


def own_keys(model: Any, positions: Tensor) -> Tensor:
    """The model's own keys [L, H, T, D] of TOKENS, each in a sequence of its own that holds nothing else. A token that
    attends to itself alone has the same hidden states at every position, in all layers.
    """
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(TOKENS[:, None], position_ids=positions[:, None], past_key_values=cache, use_cache=True)
    held = [as_held(layer.keys, layer.values, model)[0] for layer in cache.layers]
    return torch.stack([keys[:, :, 0].transpose(0, 1) for keys in held])


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """As from_pretrained(dtype=...) does: the weights change, the frequencies stay float32."""
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in frequencies.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_the_models_own(family: str) -> None:
    model = FAMILIES[family]()
    spec = RopeSpec.from_config(model.config, interleaved=family in INTERLEAVED)
    rotary = rotary_module(model)
    for index, layer in enumerate(spec.layers):
        if layer is None:
            continue
        prefix = "" if hasattr(rotary, "inv_freq") else f"{model.config.layer_types[index]}_"
        inv_freq, factor = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
        assert inv_freq.dtype == torch.float32
        assert torch.equal(inv_freq, layer.frequencies)
        assert layer.attention_factor == factor
        assert layer.matches(inv_freq, factor)
        assert not layer.matches(inv_freq * 1.001, factor)
    without = tuple(index for index, layer in enumerate(spec.layers) if layer is None)
    assert without == WITHOUT_ROPE.get(family, ())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_moved_key_is_the_models_key(family: str, dtype: torch.dtype) -> None:
    model = in_dtype(FAMILIES[family](), dtype)
    spec = RopeSpec.from_config(model.config, interleaved=family in INTERLEAVED)
    source, target = FROM.clone(), TO.clone()
    if family not in LONGROPE:
        source[4], target[2] = LAST - 1, LAST
    at_p, at_q = own_keys(model, source), own_keys(model, target)
    assert error(at_p, at_q) > 0.1  # the move is not nothing
    frame = unrotate(at_p, source, spec)
    assert error(rotate(frame, target, spec), at_q) < TOLERANCES[dtype].model
    layers = of_model(model, spec, family in INTERLEAVED)
    assert error(frame, oracle(at_p, source, layers, sign=-1)) < TOLERANCES[dtype].once
    assert error(rotate(frame, target, spec), oracle(frame, target, layers)) < TOLERANCES[dtype].once


@pytest.mark.parametrize("family", sorted(LONGROPE))
def test_long_factors_past_the_switch(family: str) -> None:
    model = FAMILIES[family]()
    spec = RopeSpec.from_config(model.config, prompt_length=SWITCH_LENGTH + 1)
    source, target = FROM.clone(), TO.clone()
    source[-1] = target[-2] = LAST  # a longer sequence makes the model use its long factors at all positions
    at_p, at_q = own_keys(model, source), own_keys(model, target)
    assert error(rotate(unrotate(at_p, source, spec), target, spec), at_q) < TOLERANCES[torch.float32].model
    short = RopeSpec.from_config(model.config, prompt_length=SWITCH_LENGTH)
    assert error(unrotate(at_p[:, :, :6], source[:6], short), unrotate(at_p, source, spec)[:, :, :6]) > 0.01


@pytest.mark.parametrize("family", ["llama-yarn", "llama-longrope"])
def test_attention_factor_is_kept_once(family: str) -> None:
    """The unrotated key is ``a`` times the projection's output; moving a key does not change its norm."""
    model = FAMILIES[family]()
    spec = RopeSpec.from_config(model.config)
    projected: list[Tensor] = []
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, __, out: projected.append(out))
    keys = own_keys(model, FROM)
    hook.remove()
    plain = projected[0][:, 0].view(len(TOKENS), keys.shape[1], -1).transpose(0, 1)  # [H, T, D]
    factor = spec.layers[0].attention_factor  # type: ignore[union-attr]
    assert factor > 1.05
    assert error(unrotate(keys, FROM, spec)[0], factor * plain) < TOLERANCES[torch.float32].model


def test_wrong_pairing_is_far_off() -> None:
    """The two pairings differ so much that a family in the wrong list cannot pass."""
    for family in ("llama", *sorted(INTERLEAVED)):
        model = FAMILIES[family]()
        spec = RopeSpec.from_config(model.config, interleaved=family not in INTERLEAVED)
        moved = rotate(unrotate(own_keys(model, FROM), FROM, spec), TO, spec)
        assert error(moved, own_keys(model, TO)) > 0.1
