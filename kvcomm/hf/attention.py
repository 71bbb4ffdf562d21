"""Attention for passes over chosen positions: grouped heads without repeated keys, keys cut at each block of queries.

transformers' sdpa repeats the KV heads for every group of query heads as soon as a mask is given, and lets each query
look at every key, hidden or not. For a hundred tokens scattered over thousands that costs more than all else together.
The function here is registered through transformers' public interface and is used only inside ``over``: it knows the
positions of the pass's queries. A thread outside such a pass that sees its name gets plain sdpa and sdpa's masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvcomm_positions"
# Queries that share one cut of the keys. On a CPU blocks of 16 to 64 are alike and 128 takes three times as long (128
# tokens over 3,072, 9 heads of 64); on a device each block is a launch.
_CPU_BLOCK, _DEVICE_BLOCK = 32, 128
_NOT_HANDLED = ("softcap", "s_aux", "position_bias")


class NotHandled(Exception):
    """A layer asks for more than scaled, masked softmax attention; the model's own masked path must run instead."""


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


class Watch:
    """Collects the attention that chosen queries of a pass pay to each key.

    Args:
        queries: indices into the pass's positions, increasing.
        length: keys in sight.

    Attributes:
        total: sum over heads and layers of the probabilities, [queries, length] float32; ``heads`` counts them.
    """

    def __init__(self, queries: Sequence[int], length: int, device: torch.device) -> None:
        self.queries = torch.tensor(list(queries), dtype=torch.int64, device=device)
        self.total = torch.zeros(len(queries), length, device=device)
        self.heads = 0

    @property
    def mean(self) -> torch.Tensor:
        """Attention averaged over heads and layers, [queries, length]; each row sums to 1."""
        return self.total / max(self.heads, 1)

    def see(self, block: Block, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """Add one layer's probabilities for the watched queries of ``block``.

        Args:
            query: [kv heads, group, block.stop - block.first, head_dim].
            key: [kv heads, 1 or group, block.high - block.low, head_dim].
        """
        inside = (self.queries >= block.first) & (self.queries < block.stop)
        if not bool(inside.any()):
            return
        rows = self.queries[inside] - block.first
        scores = (query[:, :, rows].float() * scaling) @ key.float().transpose(-1, -2) + block.bias[0, 0, rows].float()
        self.total[inside, block.low : block.high] += scores.softmax(-1).sum((0, 1))


class Pass:
    """What the attention function has to know of one pass.

    Args:
        positions: of its queries, strictly increasing int64 [n].
        windows: for each layer the width of its sliding window in tokens, or None.
        dtype: of the model's keys and values.
        watch: collects probabilities, or None.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        watch: Watch | None = None,
    ) -> None:
        self.tokens = int(positions.shape[0])
        self.windows = tuple(windows)
        self.watch = watch
        self._blocks = {window: _blocks(positions, window, dtype) for window in set(windows)}

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """The blocks of queries as a layer sees them."""
        return self._blocks[self.windows[layer]]


def _blocks(positions: torch.Tensor, window: int | None, dtype: torch.dtype) -> tuple[Block, ...]:
    size = _CPU_BLOCK if positions.device.type == "cpu" else _DEVICE_BLOCK
    where = positions.tolist()
    blocks = []
    for first in range(0, len(where), size):
        stop = min(first + size, len(where))
        low = 0 if window is None else max(where[first] - window + 1, 0)
        high = where[stop - 1] + 1
        keys = torch.arange(low, high, device=positions.device)
        at = positions[first:stop, None]
        hidden = keys[None] > at
        if window is not None:
            hidden |= keys[None] <= at - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
        blocks.append(Block(first, stop, low, high, bias[None, None]))
    return tuple(blocks)


_active: ContextVar[Pass | None] = ContextVar("kvcomm_attention_pass", default=None)


def positions_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: query [1, heads, n, head_dim], key and value [1, kv heads, length, head_dim].

    Returns:
        [1, n, heads, head_dim], and None for the weights.

    Raises:
        NotHandled: inside a pass, for softcapping, attention sinks, position biases or dropout.
    """
    current = _active.get()
    if current is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    layer = getattr(module, "layer_idx", None)
    asked = [name for name in _NOT_HANDLED if kwargs.get(name) is not None]
    if layer is None or asked or dropout or query.shape[0] != 1 or query.shape[2] != current.tokens:
        raise NotHandled(f"{type(module).__name__} asks for {asked or 'another shape of attention'}")
    _, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, head_dim)
    out = query.new_empty(1, tokens, heads, value.shape[3])
    for block in current.blocks(layer):
        q = grouped[:, :, block.first : block.stop]
        # A stride of 0 over the group: the kernel reads each KV head in place, and one mask serves all heads.
        k = key[0, :, None, block.low : block.high].expand(-1, heads // kv_heads, -1, -1)
        v = value[0, :, None, block.low : block.high].expand(-1, heads // kv_heads, -1, -1)
        seen = scaled_dot_product_attention(q, k, v, attn_mask=block.bias, scale=scale)
        out[0, block.first : block.stop] = seen.flatten(0, 1).transpose(0, 1)
        if current.watch is not None:
            current.watch.see(block, q, k, scale)
    if current.watch is not None:
        current.watch.heads += heads
    return out, None


def register() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, positions_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


class _Switch:
    """The name in one model's configuration, set while any pass is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = 0
        self._own: str | None = None

    def enter(self, config: Any) -> None:
        with self._lock:
            if self._passes == 0:
                self._own = config._attn_implementation
                config._attn_implementation = NAME
            self._passes += 1

    def leave(self, config: Any) -> None:
        with self._lock:
            self._passes -= 1
            if self._passes == 0:
                config._attn_implementation = self._own


_switches: WeakKeyDictionary[PreTrainedModel, _Switch] = WeakKeyDictionary()
_switches_lock = threading.Lock()


@contextmanager
def over(model: PreTrainedModel, config: Any, current: Pass) -> Iterator[None]:
    """Attention of ``model`` in this thread runs over the pass's positions; undone at the end, whatever happens.

    Several threads may be inside at once, each with a pass of its own.
    """
    with _switches_lock:
        switch = _switches.setdefault(model, _Switch())
    token = _active.set(current)
    switch.enter(config)
    try:
        yield
    finally:
        switch.leave(config)
        _active.reset(token)
