"""Attention over chosen positions by flash-attn (Dao 2023, arXiv 2307.08691): runs of tokens as short sequences.

A run of neighbouring positions is a sequence of its own over the one KV cache, as long as its last position says.
flash-attn's causal mask is aligned to the bottom right corner, so the run's last query sees all of that and each one
before it one key less: no mask is made or read, and one launch a layer does all runs. Runs are cut into pieces of equal
width; shorter ones are padded in front, where rows of a tile would be idle anyway.
"""

from __future__ import annotations

import torch

PIECE = 64  # rows of a tile of queries in flash-attn's kernel for a KV cache
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def pieces_of(positions: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring positions, cut to at most ``PIECE``, as indices (first, stop) into ``positions``."""
    pieces, first = [], 0
    for index in range(1, len(positions) + 1):
        end = index == len(positions) or positions[index] != positions[index - 1] + 1
        if end or index - first == PIECE:
            pieces.append((first, index))
            first = index
    return pieces


class Flash:
    """See ``kvcomm.hf.attend.Attend``; for bfloat16 and float16 on a GPU.

    Attributes:
        rows: int64 [pieces, width], which query stands in each row; those before a piece's own repeat its first.
        lengths: int32 [pieces], keys that each piece's last query sees.
        back: int64 [n], where in the flattened rows each query stands.
    """

    def __init__(self, positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> None:
        where, device = positions.tolist(), positions.device
        pieces = pieces_of(where)
        width = max(stop - first for first, stop in pieces)
        rows = [[first] * (width - stop + first) + list(range(first, stop)) for first, stop in pieces]
        back = [n * width + width - stop + at for n, (first, stop) in enumerate(pieces) for at in range(first, stop)]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.back = torch.tensor(back, dtype=torch.int64, device=device)
        self.lengths = torch.tensor([where[stop - 1] + 1 for _, stop in pieces], dtype=torch.int32, device=device)
        self.cache = torch.zeros(len(pieces), dtype=torch.int32, device=device)  # all read the same
        self.window = (-1, -1) if window is None else (window - 1, 0)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        from flash_attn import flash_attn_with_kvcache

        out: torch.Tensor = flash_attn_with_kvcache(
            query[0].transpose(0, 1)[self.rows],  # [pieces, width, heads, head_dim]
            key.transpose(1, 2),
            value.transpose(1, 2),
            cache_seqlens=self.lengths,
            cache_batch_idx=self.cache,
            softmax_scale=scaling,
            causal=True,
            window_size=self.window,
        )
        return out.flatten(0, 1)[self.back][None]
