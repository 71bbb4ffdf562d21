"""Attention of a model during passes over chosen positions, put there through transformers' public interface.

transformers' sdpa repeats the KV heads for every group of query heads as soon as a mask is given, and lets each query
look at every key, hidden or not. For a hundred tokens scattered over thousands that costs more than all else together.
The function here knows the positions of the pass's queries and hands them to what ``kvcomm.hf.attend`` chose. It is
registered when a backend is built and used only inside ``over``. A thread outside such a pass that sees its name gets
plain sdpa and sdpa's masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcomm.hf.attend import Implementation
from kvcomm.hf.grouped import Block, Grouped, by_kv_head

NAME = "kvcomm_positions"
_NOT_HANDLED = ("softcap", "s_aux", "position_bias")


class NotHandled(Exception):
    """A layer asks for more than scaled, masked softmax attention; the model's own masked path must run instead."""


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

    def see(self, blocks: Sequence[Block], query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """Add one layer's probabilities for the watched queries.

        Args:
            query: [1, heads, n, head_dim].
            key: [1, kv heads, length, head_dim].
        """
        grouped = by_kv_head(query, key)
        for block in blocks:
            q, k = grouped[:, :, block.first : block.stop], key[0, :, None, block.low : block.high]
            self._see(block, q, k, scaling)
        self.heads += query.shape[1]

    def _see(self, block: Block, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
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
        attend: the attention to run.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        watch: Watch | None = None,
        attend: Implementation = Grouped,
    ) -> None:
        self.tokens = int(positions.shape[0])
        self.windows = tuple(windows)
        self.watch = watch
        self._attend = {window: attend(positions, window, dtype) for window in set(windows)}
        self._watched = {} if watch is None else {w: Grouped(positions, w, dtype).blocks for w in set(windows)}

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of one layer, watched if the pass is; arguments and result as of ``kvcomm.hf.attend.Attend``."""
        window = self.windows[layer]
        if self.watch is not None:
            self.watch.see(self._watched[window], query, key, scaling)
        return self._attend[window](query, key, value, scaling)


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
    return current.run(layer, query, key, value, query.shape[3] ** -0.5 if scaling is None else scaling), None


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
