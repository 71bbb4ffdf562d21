"""Attention over chosen positions by torch's own kernel under block masks: on a CPU, and on a GPU without flash-attn.

Heads are grouped, so that no KV head is repeated in memory, and each block of queries reads the keys that its last one
sees and no further.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Queries that share one cut of the keys. On a CPU blocks of 16 to 64 are alike and 128 takes three times as long (128
# tokens over 3,072, 9 heads of 64); on a device each block is a launch.
_CPU_BLOCK, _DEVICE_BLOCK = 32, 128
_ALIGNED = 16  # GPU kernels copy a mask whose rows do not start at multiples of so many elements


@dataclass(frozen=True)
class Block:
    """Queries ``first`` to ``stop`` of a pass, which see keys among ``low`` to ``high``.

    Attributes:
        bias: 0 where a query sees a key, else minus infinity; [1, 1, stop - first, high - low] in the KV's dtype.
    """

    first: int
    stop: int
    low: int
    high: int
    bias: torch.Tensor


class Grouped:
    """See ``kvcomm.hf.attend.Attend``."""

    def __init__(self, positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> None:
        self.blocks = _blocks(positions, window, dtype)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        _, heads, tokens, _ = query.shape
        grouped = by_kv_head(query, key)
        out = query.new_empty(1, tokens, heads, value.shape[3])
        for block in self.blocks:
            # A stride of 0 over the group: the kernel reads each KV head in place, and one mask serves all heads.
            k = key[0, :, None, block.low : block.high].expand(-1, grouped.shape[1], -1, -1)
            v = value[0, :, None, block.low : block.high].expand(-1, grouped.shape[1], -1, -1)
            q = grouped[:, :, block.first : block.stop]
            seen = scaled_dot_product_attention(q, k, v, attn_mask=block.bias, scale=scaling)
            out[0, block.first : block.stop] = seen.flatten(0, 1).transpose(0, 1)
        return out


def by_kv_head(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Queries [1, heads, n, head_dim] as [kv heads, heads of each, n, head_dim]."""
    return query[0].reshape(key.shape[1], -1, *query.shape[2:])


def _blocks(positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> tuple[Block, ...]:
    on_cpu = positions.device.type == "cpu"
    size = _CPU_BLOCK if on_cpu else _DEVICE_BLOCK
    where = positions.tolist()
    blocks = []
    for first in range(0, len(where), size):
        stop = min(first + size, len(where))
        low = 0 if window is None else max(where[first] - window + 1, 0)
        high = where[stop - 1] + 1
        width = high - low if on_cpu else -(-(high - low) // _ALIGNED) * _ALIGNED
        keys = torch.arange(low, low + width, device=positions.device)
        at = positions[first:stop, None]
        hidden = keys[None] > at
        if window is not None:
            hidden |= keys[None] <= at - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
        blocks.append(Block(first, stop, low, high, bias[None, None, :, : high - low]))
    return tuple(blocks)
