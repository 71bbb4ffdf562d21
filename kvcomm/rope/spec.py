"""What rotary embedding each layer of a model applies to its keys, read from a transformers config.

The config is read by its attributes only, so this module does not need transformers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvcomm.errors import InvalidInput, UnsupportedModel
from kvcomm.rope.frequencies import FREQUENCIES, REFUSED, RopeInputs
from kvcomm.types import digest_fields

FactorSet = Literal["short", "long"]
MAX_POSITION = 2**24  # positions are turned to float32 first, which is exact up to here


@dataclass(frozen=True)
class LayerRope:
    """The rotation of one layer.

    Attributes:
        rope_type: a name of ``kvcomm.rope.frequencies.FREQUENCIES``.
        inv_freq: float32 values, radians per position, one for each pair of rotated dimensions.
        attention_factor: ``a`` in ``a * R(p) * k``. Recorded only: it is in the model's keys once and stays there.
        head_dim: size of one head's key.
        interleaved: False pairs dimension i with i + rotary_dim / 2 (halves: Llama, Qwen, Gemma, GPT-NeoX); True pairs
            2i with 2i + 1 (Cohere, GLM, Llama 4).
    """

    rope_type: str
    inv_freq: tuple[float, ...]
    attention_factor: float
    head_dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rotary_dim <= self.head_dim:
            raise UnsupportedModel(
                f"rope type {self.rope_type!r} turns {self.rotary_dim} of {self.head_dim} dimensions; it must turn 2 "
                "to head_dim of them"
            )
        if not all(map(math.isfinite, (*self.inv_freq, self.attention_factor))):
            raise UnsupportedModel(f"rope type {self.rope_type!r} has frequencies or an attention factor not finite")

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions, the first of the head; the others pass through."""
        return 2 * len(self.inv_freq)

    @cached_property
    def frequencies(self) -> Tensor:
        """inv_freq as a float32 CPU tensor, [rotary_dim / 2]; not to be written to."""
        return torch.tensor(self.inv_freq, dtype=torch.float32, device="cpu")

    def matches(self, inv_freq: Tensor, attention_factor: float) -> bool:
        """Whether a model's own rotary module holds exactly these frequencies and this factor."""
        theirs = inv_freq.detach().to(device="cpu", dtype=torch.float32)
        return torch.equal(theirs, self.frequencies) and float(attention_factor) == self.attention_factor

    @property
    def digest(self) -> str:
        """SHA-256 hex digest over all fields."""
        numbers = struct.pack(f"<{len(self.inv_freq)}f", *self.inv_freq)
        pairing = b"interleaved" if self.interleaved else b"halves"
        factor = struct.pack("<d", self.attention_factor)
        return digest_fields(b"layer", self.rope_type.encode(), numbers, factor, b"%d" % self.head_dim, pairing)


@dataclass(frozen=True)
class RopeSpec:
    """The rotation of every layer; two specs are equal exactly when they turn keys alike.

    Attributes:
        layers: one entry a layer, None for a layer without rope.
        factor_set: which of LongRoPE's sets the frequencies hold, or None for models without LongRoPE.
        switch_length: the longest sequence, in tokens, that LongRoPE computes with the short set, or None.

    Raises:
        UnsupportedModel: no layer, or layers whose heads differ in size.
    """

    layers: tuple[LayerRope | None, ...]
    factor_set: FactorSet | None = None
    switch_length: int | None = None

    def __post_init__(self) -> None:
        sizes = {layer.head_dim for layer in self.layers if layer is not None}
        if not self.layers or len(sizes) > 1:
            raise UnsupportedModel(
                f"{len(self.layers)} layers with head sizes {sorted(sizes)}: keys of all layers must share one size to "
                "be held as one tensor"
            )

    @property
    def head_dim(self) -> int | None:
        """Size of one head's key, or None where no layer has rope."""
        return next((layer.head_dim for layer in self.layers if layer is not None), None)

    @property
    def limit(self) -> int:
        """Positions must be below this one: the switch length under the short set, else the largest exact position."""
        if self.factor_set == "short" and self.switch_length is not None:
            return min(self.switch_length, MAX_POSITION)
        return MAX_POSITION

    def crosses(self, prompt_length: int) -> bool:
        """Whether a sequence of ``prompt_length`` tokens is computed with the other factor set than this one, so that
        keys in this spec's frame cannot be reused in it.
        """
        return self.switch_length is not None and (prompt_length > self.switch_length) != (self.factor_set == "long")

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex digest over all fields."""
        layers = (b"none" if layer is None else layer.digest.encode() for layer in self.layers)
        return digest_fields(b"rope", str(self.factor_set).encode(), str(self.switch_length).encode(), *layers)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        interleaved: bool = False,
        prompt_length: int | None = None,
        rope_layers: Sequence[bool] | None = None,
    ) -> RopeSpec:
        """Read the rotation of each layer.

        Args:
            config: a text model's transformers config (for a multimodal model, ``config.get_text_config()``).
            interleaved: the pairing, which depends on the model's code and is not in its config.
            prompt_length: tokens of the sequence, which choose LongRoPE's factor set; None takes the short one.
            rope_layers: for families whose code leaves rope out of some layers without saying so in ``no_rope_layers``
                (Cohere 2, EXAONE 4): True for each layer that has rope.

        Raises:
            UnsupportedModel: a rope type or a layout that cannot be moved correctly; the message names it.
            InvalidInput: ``rope_layers`` does not have one entry a layer.
        """
        count = getattr(config, "num_hidden_layers", None)
        if not isinstance(count, int):
            raise UnsupportedModel(f"{type(config).__name__} has no num_hidden_layers; pass the text model's config")
        present = _layers_with_rope(config, count, rope_layers)
        layers: list[LayerRope | None] = []
        switches: set[int] = set()
        for index in range(count):
            parameters = _parameters(config, index, count) if present[index] else None
            if parameters is None:
                layers.append(None)
                continue
            if parameters["rope_type"] == "longrope":
                switches.add(int(parameters["original_max_position_embeddings"]))
            layers.append(_layer(config, index, parameters, interleaved, prompt_length))
        if len(switches) > 1:
            raise UnsupportedModel(f"longrope with several switch lengths {sorted(switches)} in one model")
        switch = next(iter(switches), None)
        long = switch is not None and prompt_length is not None and prompt_length > switch
        return cls(tuple(layers), None if switch is None else "long" if long else "short", switch)


def latent_head_dim(config: Any) -> int | None:
    """Width of a key of multi-head latent attention as kvcomm holds it, or None for any other attention.

    A token's rotary key and behind it its latent, cut in the middle (kvcomm.hf.latent): the rotary part comes first.

    Raises:
        UnsupportedModel: the two widths do not make two halves of which the first holds the rotary key.
    """
    latent, rotary = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if not latent and not rotary:
        return None
    if not latent or not rotary or latent < rotary or (latent + rotary) % 2:
        raise UnsupportedModel(
            f"multi-head latent attention with kv_lora_rank={latent} and qk_rope_head_dim={rotary}: supported are "
            "latents at least as wide as the rotary key, both even"
        )
    return int(latent + rotary) // 2


def _layers_with_rope(config: Any, count: int, rope_layers: Sequence[bool] | None) -> list[bool]:
    """Whether each layer has rope. ``no_rope_layers`` (SmolLM3, Llama 4) has 1 for layers *with* rope, despite its
    name; ``layer_rope_theta`` (Granite SWA) has 0 for layers without.
    """
    present = [True] * count
    for name, flags in (
        ("rope_layers", rope_layers),
        ("no_rope_layers", getattr(config, "no_rope_layers", None)),
        ("layer_rope_theta", getattr(config, "layer_rope_theta", None)),
    ):
        if not flags:
            continue
        if len(flags) != count:
            error = InvalidInput if name == "rope_layers" else UnsupportedModel
            raise error(f"{name} has {len(flags)} entries for {count} layers; give one a layer")
        present = [both and bool(flag) for both, flag in zip(present, flags, strict=True)]
    return present


def _parameters(config: Any, index: int, count: int) -> dict[str, Any] | None:
    """Layer ``index``'s rope parameters, completed as transformers completes them; None for a layer without rope."""
    stated = getattr(config, "rope_parameters", None)
    if not isinstance(stated, Mapping) or not stated:
        raise UnsupportedModel(
            f"{type(config).__name__} has no rope_parameters: positions are not rotary, or are in a form older than "
            "transformers 5"
        )
    types = getattr(config, "layer_types", None) or ()
    nested = any(key in types for key in stated)
    if nested:
        if len(types) != count or types[index] not in stated:
            raise UnsupportedModel(f"rope_parameters for {sorted(map(str, stated))} do not cover all layer types")
        stated = stated[types[index]]
        if stated is None:
            return None
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise UnsupportedModel(f"rope_parameters are nested by {sorted(map(str, stated))}, which are not layer types")
    parameters = dict(stated)
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(name) is None:
            parameters[name] = getattr(config, name, None)
    theta = getattr(config, "layer_rope_theta", None)
    if theta:
        parameters["rope_theta"] = theta[index]
    trained = getattr(config, "original_max_position_embeddings", None)
    if trained is not None and not nested:  # stated outside, it has precedence (Phi-3)
        parameters["original_max_position_embeddings"] = trained
    elif parameters.get("original_max_position_embeddings") is None:
        parameters["original_max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    return parameters


def _layer(
    config: Any, index: int, parameters: dict[str, Any], interleaved: bool, prompt_length: int | None
) -> LayerRope:
    kind = "mrope" if parameters.get("mrope_section") else str(parameters["rope_type"])
    if kind not in FREQUENCIES:
        reason = REFUSED.get(kind, "its frequencies are not known here")
        raise UnsupportedModel(f"rope type {kind!r} in layer {index}: {reason}; supported are {sorted(FREQUENCIES)}")
    own = config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
    latent = latent_head_dim(own)
    rotary = None if latent is None else own.qk_rope_head_dim
    head_dim = rotary or getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    trained = parameters["original_max_position_embeddings"]
    inputs = RopeInputs(
        parameters,
        head_dim,
        getattr(config, "max_position_embeddings", 0),
        long=prompt_length is not None and trained is not None and prompt_length > trained,
        truncate=config.rope_parameters.get("truncate", True),  # transformers reads it from the outer level only
    )
    inv_freq, attention_factor = FREQUENCIES[kind](inputs)
    return LayerRope(kind, tuple(inv_freq.tolist()), float(attention_factor), latent or head_dim, interleaved)
