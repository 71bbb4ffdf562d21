"""Flex attention behind kvcomm's interface for attention over chosen positions, to be timed beside the ones in use.

It needs one launch a layer, makes no mask of queries times keys in each layer, and skips keys outside a window. It is
not in use because it is compiled: for seconds, and again inside some later call when sizes meet a new guard. Here sizes
are kept from most of them: queries are padded to two or more blocks of 128, and short caches go to torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kvcomm.hf.grouped import Grouped

BLOCK = 128


@cache
def compiled() -> Callable[..., Any]:
    """flex_attention, compiled at its first call for sizes that vary."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


class Flex:
    """See ``kvcomm.hf.attend.Attend``; for passes over more than two blocks of keys."""

    def __init__(self, positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> None:
        self.rows = max(2, -(-len(positions) // BLOCK)) * BLOCK
        self.at = torch.full((self.rows,), -1, dtype=torch.int64, device=positions.device)  # padding sees nothing
        self.at[: len(positions)] = positions
        self.low = torch.zeros_like(self.at) if window is None else self.at - window + 1
        self.masks: dict[int, Any] = {}
        self.short = Grouped(positions, window, dtype)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        length, tokens = key.shape[2], query.shape[2]
        if length <= 2 * BLOCK:
            return self.short(query, key, value, scaling)
        if length not in self.masks:
            self.masks[length] = self._mask(length)
        padded = torch.nn.functional.pad(query, (0, 0, 0, self.rows - tokens))
        out = compiled()(padded, key, value, block_mask=self.masks[length], scale=scaling, enable_gqa=True)
        return out[:, :, :tokens].transpose(1, 2)

    def _mask(self, length: int) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        at, low = self.at, self.low

        def seen(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= at[q]) & (k >= low[q])

        return create_block_mask(seen, None, None, self.rows, length, device=at.device)
