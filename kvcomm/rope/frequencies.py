"""Inverse frequencies and attention factor, one pure function for each rope type.

Every function does the operations of the published definition in the order in which transformers does them, so that
the result is equal to what a model's own rotary module holds, bit for bit. All arithmetic is float32 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcomm.errors import UnsupportedModel


@dataclass(frozen=True)
class RopeInputs:
    """What a rope type may read.

    Attributes:
        parameters: one layer's rope parameters as the config holds them, ``rope_theta`` included.
        head_dim: size of one head's key.
        max_positions: the config's ``max_position_embeddings``.
        long: whether LongRoPE uses its long factors; no other type reads it.
        truncate: whether YaRN rounds the bounds of its ramp to whole dimensions.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_positions: int
    long: bool = False
    truncate: bool = True

    def need(self, name: str) -> Any:
        """The parameter ``name``.

        Raises:
            UnsupportedModel: it is missing or None.
        """
        value = self.parameters.get(name)
        if value is None:
            raise UnsupportedModel(
                f"rope type {self.parameters.get('rope_type', 'default')!r} needs {name!r}, which rope_parameters "
                f"{sorted(map(str, self.parameters))} lacks; complete the model's config"
            )
        return value

    @property
    def partial(self) -> float:
        """The share of the head that the type covers, 1.0 where the config says nothing."""
        share = self.parameters.get("partial_rotary_factor")
        return 1.0 if share is None else share

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of the head."""
        return int(self.head_dim * self.partial)


def _powers(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim


def default(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Su et al. 2021, RoFormer (arXiv 2104.09864): theta ** (-2i / dim).

    Returns:
        inv_freq, float32 [rotary_dim / 2], in radians per position, and the attention factor 1.0.
    """
    inv_freq: Tensor = 1.0 / (inputs.need("rope_theta") ** _powers(inputs.rotary_dim))
    return inv_freq, 1.0


def linear(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Chen et al. 2023, Position Interpolation (arXiv 2306.15595): all frequencies divided by ``factor``.

    Returns:
        inv_freq, float32 [rotary_dim / 2], in radians per position, and the attention factor 1.0.
    """
    return default(inputs)[0] / inputs.need("factor"), 1.0


def llama3(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Llama team 2024, The Llama 3 Herd of Models (arXiv 2407.21783): long wavelengths divided by ``factor``, short
    ones kept, a smooth passage between the two.

    Returns:
        inv_freq, float32 [rotary_dim / 2], in radians per position, and the attention factor 1.0.
    """
    inv_freq, _ = default(inputs)
    factor = inputs.need("factor")
    low, high = inputs.need("low_freq_factor"), inputs.need("high_freq_factor")
    trained = inputs.need("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq  # in positions
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, inv_freq)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < trained / high) * ~(wavelength > trained / low)
    return torch.where(between, blended, scaled), 1.0


def yarn(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Peng et al. 2023, YaRN (arXiv 2309.00071), sections 3.2 (the ramp) and 3.4 (the attention factor).

    Returns:
        inv_freq, float32 [rotary_dim / 2], in radians per position, and the attention factor that the model
        multiplies into cosine and sine.
    """
    parameters, dim, base = inputs.parameters, inputs.rotary_dim, inputs.need("rope_theta")
    trained = inputs.need("original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        factor = inputs.max_positions / trained

    def mscale(weight: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        bound: float = (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(base))
        return bound

    attention = parameters.get("attention_factor")
    if attention is None:
        weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale()
    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if inputs.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    pos_freqs = base ** _powers(dim)
    kept = 1 - ramp
    inv_freq: Tensor = 1.0 / (factor * pos_freqs) * (1 - kept) + 1.0 / pos_freqs * kept
    return inv_freq, float(attention)


def longrope(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Ding et al. 2024, LongRoPE (arXiv 2402.13753): one factor for each frequency, a short and a long set.

    Returns:
        inv_freq, float32 [rotary_dim / 2], in radians per position, and the attention factor that the model
        multiplies into cosine and sine (the same for both sets).
    """
    parameters, trained = inputs.parameters, inputs.need("original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        factor = inputs.max_positions / trained
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))
    name = "long_factor" if inputs.long else "short_factor"
    scale = torch.tensor(inputs.need(name), dtype=torch.float32, device="cpu")
    powers = _powers(inputs.rotary_dim)
    if scale.shape != powers.shape:
        raise UnsupportedModel(
            f"longrope's {name} has {scale.numel()} numbers for {powers.numel()} frequencies; correct the config"
        )
    inv_freq: Tensor = 1.0 / (scale * inputs.need("rope_theta") ** powers)
    return inv_freq, float(attention)


def proportional(inputs: RopeInputs) -> tuple[Tensor, float]:
    """Barbero et al. 2024, p-RoPE (arXiv 2410.06205): the lowest frequencies are set to zero, the pairing still spans
    the whole head.

    Returns:
        inv_freq, float32 [head_dim / 2], in radians per position, and the attention factor 1.0.
    """
    dim, factor = inputs.head_dim, inputs.parameters.get("factor") or 1.0
    turning = int(inputs.partial * dim // 2)
    powers = torch.arange(0, 2 * turning, 2, dtype=torch.float, device="cpu") / dim
    inv_freq = torch.zeros(dim // 2, dtype=torch.float32, device="cpu")
    inv_freq[:turning] = 1.0 / (inputs.need("rope_theta") ** powers)
    return inv_freq / factor, 1.0


FREQUENCIES: dict[str, Callable[[RopeInputs], tuple[Tensor, float]]] = {
    "default": default,
    "linear": linear,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}

REFUSED: dict[str, str] = {
    "dynamic": "dynamic NTK changes its frequencies with the length of the sequence, so keys computed at another "
    "length cannot be moved",
    "mrope": "M-RoPE gives a token three positions (time, height, width), and a shift along the text moves only some",
    "axial": "axial rope turns by two-dimensional positions of an image, not by a place in a text",
    "2d": "two-dimensional rope turns by positions in an image, not by a place in a text",
}
