"""Made-up bases and offsets of a small model's shape, with a known law between them."""

from __future__ import annotations

import torch

from kvcomm.types import ModelFingerprint, SegmentKV

LAYERS, HEADS, DIM = 3, 2, 4
WIDTH = 2 * DIM
FINGERPRINT = ModelFingerprint("tiny", "w", "r", "float32", "", "t", LAYERS, HEADS, DIM)


def random_kv(tokens: int, seed: int) -> SegmentKV:
    """Independent normal keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, tokens, DIM)
    return SegmentKV(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def plus(base: SegmentKV, offset: torch.Tensor) -> SegmentKV:
    """``base`` with ``offset`` [layers - 1, heads, T, 2 * head_dim] added behind the first layer."""
    keys, values = base.keys.clone(), base.values.clone()
    keys[1:] += offset[..., :DIM].float()
    values[1:] += offset[..., DIM:].float()
    return SegmentKV(keys, values)


def offset_of(base: SegmentKV, true: SegmentKV) -> torch.Tensor:
    """What was added behind the first layer, float64."""
    return torch.cat([true.keys - base.keys, true.values - base.values], dim=-1)[1:].double()


def law(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear law: weights [layers - 1, heads, F, F] and a constant [layers - 1, heads, 1, F]."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(LAYERS - 1, HEADS, WIDTH, WIDTH, generator=generator) / WIDTH
    return weights, torch.randn(LAYERS - 1, HEADS, 1, WIDTH, generator=generator)
