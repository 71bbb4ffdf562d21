"""Which attention runs over chosen positions: one interface, an implementation by device and by what is installed.

An implementation is made once for each pass and width of window, and then called in each layer. On a GPU it is compared
with torch's own kernel before it is used, at the model's own shape; what differs or fails is named in a warning and
not used.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcomm.hf.flash import DTYPES, MAX_HEAD_DIM, Flash, pieces_of
from kvcomm.hf.grouped import Grouped

log = logging.getLogger(__name__)
# By count, not measured: flash-attn reads KV and takes a tile of 64 rows for every piece, so at 16 tokens a piece it
# does four times the work of full tiles; but in four times the programs, of which torch's kernel has too few to fill a
# card at a hundred queries, and it neither makes nor reads a mask.
RUN = 16


class Attend(Protocol):
    """Attention of one pass in layers with one width of window; softmax of scaled scores, causal by position."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend.

        Args:
            query: [1, heads, n, head_dim], one for each position of the pass.
            key, value: [1, kv heads, length, head_dim], any strides but the last, which is 1.

        Returns:
            [1, n, heads, head_dim].
        """
        ...


Implementation = Callable[[torch.Tensor, "int | None", torch.dtype], Attend]
"""From a pass's positions (int64 [n], strictly increasing, on the KV's device), a window in tokens, the KV's dtype."""


@dataclass(frozen=True)
class Shape:
    """What choosing has to know of a model.

    Attributes:
        windows: the widths that occur, or None for layers that see everything.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...]


def flash_or_grouped(positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> Attend:
    """flash-attn for passes over runs of tokens, torch's kernel for those over scattered ones."""
    long = len(positions) >= RUN * len(pieces_of(positions.tolist()))
    return Flash(positions, window, dtype) if long else Grouped(positions, window, dtype)


def choose(shape: Shape) -> Implementation:
    """The best implementation that is there and right."""
    fits = shape.dtype in DTYPES and shape.head_dim % 8 == 0 and shape.head_dim <= MAX_HEAD_DIM
    if shape.device.type == "cuda" and fits and importlib.util.find_spec("flash_attn") is not None:
        if _is_right("flash-attn", Flash, shape):
            return flash_or_grouped
    return Grouped


def _is_right(name: str, implementation: Implementation, shape: Shape) -> bool:
    try:
        error = max(difference(implementation, shape, positions) for positions in _spreads())
    except Exception as failure:
        log.warning("%s fails on %s and is not used there: %s", name, shape.device, failure, exc_info=failure)
        return False
    limit = 1e-4 if shape.dtype == torch.float32 else 2e-2
    if not error <= limit:
        log.warning("%s on %s is off by %.1e (limit %.0e) and not used there", name, shape.device, error, limit)
        return False
    return True


def _spreads() -> Iterable[list[int]]:
    yield [p for p in range(900) if p % 60 < 50]  # runs
    yield [*range(40, 70), *range(400, 520), 701]
    yield [0]


@torch.inference_mode()
def difference(implementation: Implementation, shape: Shape, positions: list[int]) -> float:
    """Norm of an implementation's difference from torch's own kernel, relative; the worst of the model's windows.

    Keys lie in a longer buffer, as a request's do, and NaN stands behind the last position.
    """
    generator = torch.Generator(shape.device).manual_seed(0)
    length = positions[-1] + 1

    def random(heads: int, tokens: int) -> torch.Tensor:
        part = torch.randn(1, heads, tokens, shape.head_dim, generator=generator, device=shape.device)
        return part.to(shape.dtype)

    query, key, value = random(shape.heads, len(positions)), *(random(shape.kv_heads, length + 40) for _ in range(2))
    key[:, :, length:], value[:, :, length:] = torch.nan, torch.nan
    key, value = key[:, :, :length], value[:, :, :length]
    where = torch.tensor(positions, device=shape.device)
    errors = []
    for window in set(shape.windows):
        want = Grouped(where, window, shape.dtype)(query, key, value, 0.3).float()
        got = implementation(where, window, shape.dtype)(query, key, value, 0.3).float()
        errors.append(float((got - want).norm() / want.norm()))
    return max(errors, key=lambda error: (error != error, error))  # NaN is the worst
