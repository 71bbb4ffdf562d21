"""What a rotation should give, written apart from the package: float32 angles, everything else in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcomm.rope import LayerRope, RopeSpec


class Tolerance(NamedTuple):
    """Largest allowed error as a share of the largest key.

    Attributes:
        once: one rotation here against the oracle.
        model: a key moved here from p to q against the key that the model computes at q.
    """

    once: float
    model: float


TOLERANCES = {
    # u is half the spacing of numbers at one, the largest relative error of a rounding.
    # float32, u = 6e-8: cosine, sine, products and sum round once each: 5u for one rotation. A moved key has four of
    # them: the model's at p, its opposite, the new one, and the model's own at q.
    torch.float32: Tolerance(once=3e-7, model=1.2e-6),
    # 16 bits: arithmetic here is float32, so one rotation is the one rounding of its result: u. The models round
    # cosine, sine, both products and the sum to 16 bits, at p and again at q, and the moved key is rounded twice: 12
    # roundings of both signs, so half of that (2.3u was seen; another position or pairing is off by more than 25u).
    torch.bfloat16: Tolerance(once=2**-8, model=6 * 2**-8),
    torch.float16: Tolerance(once=2**-11, model=6 * 2**-11),
}


def oracle(keys: Tensor, positions: Tensor, layers: list[tuple[Tensor, bool] | None], sign: int = 1) -> Tensor:
    """Keys [L, H, T, D] turned by ``sign`` times their angles, float64; a layer is (inv_freq, interleaved) or None."""
    result = keys.double().clone()
    for index, layer in enumerate(layers):
        if layer is None:
            continue
        inv_freq, interleaved = layer
        pairs = len(inv_freq)
        for pair in range(pairs):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
            angle = sign * (positions.float() * inv_freq[pair]).double()  # [T]
            x, y = keys[index, :, :, first].double(), keys[index, :, :, second].double()
            result[index, :, :, first] = x * angle.cos() - y * angle.sin()
            result[index, :, :, second] = y * angle.cos() + x * angle.sin()
    return result


def of_spec(spec: RopeSpec) -> list[tuple[Tensor, bool] | None]:
    """The oracle's description of a spec."""
    return [None if layer is None else (torch.tensor(layer.inv_freq), layer.interleaved) for layer in spec.layers]


def of_model(model: Any, spec: RopeSpec, interleaved: bool) -> list[tuple[Tensor, bool] | None]:
    """The oracle's description of a model: its own rotary module's frequencies; the spec says only where rope is."""
    rotary = rotary_module(model)
    types = getattr(model.config, "layer_types", None)
    result: list[tuple[Tensor, bool] | None] = []
    for index, layer in enumerate(spec.layers):
        name = "inv_freq" if hasattr(rotary, "inv_freq") else f"{types[index]}_inv_freq"
        result.append(None if layer is None else (getattr(rotary, name).float(), interleaved))
    return result


def rotary_module(model: Any) -> Any:
    """The module that holds a model's frequencies."""
    return next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))


def make_spec(
    layers: int, head_dim: int, *, rotary_dim: int | None = None, interleaved: bool = False, theta: float = 10000.0
) -> RopeSpec:
    """A spec of the default type."""
    dim = rotary_dim or head_dim
    inv_freq = (1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)).tolist()
    return RopeSpec((LayerRope("default", tuple(inv_freq), 1.0, head_dim, interleaved),) * layers)


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference as a share of the largest wanted value; NaN in ``got`` gives NaN, which passes no limit."""
    if not want.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
