"""Attention over chosen positions on a GPU: each implementation against float32 softmax, timed beside a dense one."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.flex import Flex
from kvcomm.hf.attend import Attend, Implementation, Shape, flash_or_grouped
from kvcomm.hf.flash import Flash
from kvcomm.hf.grouped import Grouped

SHAPE = Shape(32, 8, 128, torch.bfloat16, torch.device("cuda"), (None, 1024))  # Llama-3.1-8B's, and a window
LENGTH = 4096
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # norms; probabilities are rounded too
SCALING = 0.1


def spreads(length: int) -> dict[str, list[int]]:
    """What is recomputed: the first tokens of 32 pieces of text, tokens here and there, new text at the end."""
    piece, order = max(length // 32, 16), torch.randperm(length, generator=torch.Generator().manual_seed(0))
    return {
        "first 16 of each piece": [p for p in range(length) if p % piece < 16],
        "first 8 of each piece": [p for p in range(length) if p % piece < 8],
        "a tenth, scattered": sorted(order[: length // 10].tolist()),
        "the last eighth": list(range(length - length // 8, length)),
    }


def implementations() -> dict[str, Implementation]:
    """By name, those that are installed; ``chosen`` is what passes use where flash-attn is."""
    flash = importlib.util.find_spec("flash_attn") is not None
    known: dict[str, Implementation] = {"sdpa, block masks": Grouped, "flex": Flex}
    return {**known, "flash-attn, runs": Flash, "chosen": flash_or_grouped} if flash else known


def attention(timed: Callable[[Callable[[], object]], float], shape: Shape = SHAPE, length: int = LENGTH) -> list[Any]:
    """A row for each implementation, spread and window: error and its limit, seconds, and seconds of the first call.

    Args:
        timed: gives the seconds of a call.
    """
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        whole = torch.randn(1, heads, length, shape.head_dim, generator=generator, device=shape.device)
        return whole.to(shape.dtype)

    whole, key, value = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
    dense = timed(lambda: scaled_dot_product_attention(whole, key, value, is_causal=True, enable_gqa=True))
    rows = []
    for spread, positions in spreads(length).items():
        query = whole[:, :, positions].contiguous()
        for window in shape.windows:
            want = _oracle(query, key, value, positions, window)
            for name, implementation in implementations().items():
                row: dict[str, Any] = {"attention": name, "spread": spread, "tokens": len(positions), "keys": length,
                                       "window": window, "limit": LIMITS[shape.dtype]}  # fmt: skip
                row |= _measure(implementation, positions, window, (query, key, value), want, timed)
                row["ok"] = row.get("error", float("nan")) <= row["limit"]
                if "s" in row:
                    row["over_dense_per_token"] = row["s"] / len(positions) / (dense / length)
                rows.append(row)
    return rows


def _measure(
    implementation: Implementation,
    positions: list[int],
    window: int | None,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    want: torch.Tensor,
    timed: Callable[[Callable[[], object]], float],
) -> dict[str, Any]:
    try:
        began = time.perf_counter()
        attend: Attend = implementation(torch.tensor(positions, device=want.device), window, qkv[0].dtype)
        got = attend(*qkv, SCALING).float()
        error = float((got - want).norm() / want.norm())  # waits for the device
        first = time.perf_counter() - began
        return {"error": error, "first_s": first, "s": timed(lambda: attend(*qkv, SCALING))}
    except Exception as failure:  # one that does not run here is a result, and the others are still measured
        return {"failed": f"{type(failure).__name__}: {failure}"[:300]}


def _oracle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: list[int], window: int | None
) -> torch.Tensor:
    """Softmax attention in float32, head by head: [1, n, heads, head_dim]."""
    keys, at = torch.arange(key.shape[2], device=key.device)[None], torch.tensor(positions, device=key.device)[:, None]
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    group, heads = query.shape[1] // key.shape[1], []
    for head in range(query.shape[1]):
        k, v = key[0, head // group].float(), value[0, head // group].float()
        heads.append((query[0, head].float() @ k.T * SCALING).masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return torch.stack(heads, dim=1)[None]
