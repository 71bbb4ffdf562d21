"""What reuse asks of a model: its shape, a buffer for one request's KV, and one forward over chosen positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcomm.errors import InvalidInput
from kvcomm.reuse.memory import BufferMemory
from kvcomm.rope import RopeSpec
from kvcomm.types import ModelFingerprint


@dataclass(frozen=True)
class ModelSpec:
    """What has to be known of a model to move its KV.

    Attributes:
        fingerprint: identity and shape; KV is [n_layers, n_kv_heads, tokens, head_dim].
        rope: rotary parameters of each layer.
        windows: for each layer the width of its sliding window in tokens (a query at p sees p - width + 1 to p), or
            None where it sees everything before it.
        max_positions: the model's length in tokens.
        device: where the KV lives.
        vocab_size: token ids are below it.
    """

    fingerprint: ModelFingerprint
    rope: RopeSpec
    windows: tuple[int | None, ...]
    max_positions: int
    device: torch.device
    vocab_size: int


class KVBuffer:
    """The KV of one request: preallocated, keys rotated to their positions, filled up to ``length``.

    Args:
        memory: where host memory is taken from; it comes with what another request left in it, so clear whatever is not
            filled before the buffer is handed on. None asks the system.

    Attributes:
        keys, values: [n_layers, n_kv_heads, capacity, head_dim].
        length: tokens that hold KV, from position 0.
        before_layer: where KV is still on its way, what a pass calls with a layer's number before it uses that layer.
        after_layer: what a pass calls once it has written all that it writes of a layer.
    """

    before_layer: Callable[[int], None] | None = None
    after_layer: Callable[[int], None] | None = None

    def __init__(self, spec: ModelSpec, capacity: int, memory: BufferMemory | None = None) -> None:
        f = spec.fingerprint
        shape = (2, f.n_layers, f.n_kv_heads, capacity, f.head_dim)
        if memory is None or spec.device.type != "cpu":
            both = torch.empty(shape, dtype=f.torch_dtype, device=spec.device)
        else:
            both = memory.take(f.bytes_per_token * capacity).view(f.torch_dtype).view(shape)
        self.keys, self.values = both[0], both[1]
        self.length = 0

    @classmethod
    def over(cls, keys: torch.Tensor, values: torch.Tensor, length: int) -> KVBuffer:
        """A buffer over memory that is there already, both [n_layers, n_kv_heads, capacity, head_dim]."""
        buffer = object.__new__(cls)
        buffer.keys, buffer.values, buffer.length = keys, values, length
        return buffer

    @property
    def capacity(self) -> int:
        """Tokens for which there is room."""
        return int(self.keys.shape[2])

    def settle(self) -> None:
        """Wait for what is on its way. Raises ArrivalLost (kvcomm.anchors.arriving)."""
        if self.before_layer is not None:
            self.before_layer(int(self.keys.shape[0]) - 1)
            self.before_layer = None

    def clear(self, start: int, stop: int) -> None:
        """Write zeros to positions ``start`` to ``stop``; InvalidInput as for check_range."""
        self.check_range(start, stop)
        self.keys[:, :, start:stop].zero_()
        self.values[:, :, start:stop].zero_()

    def check_range(self, start: int, stop: int) -> None:
        """Raise InvalidInput unless 0 <= start <= stop <= capacity."""
        if not 0 <= start <= stop <= self.capacity:
            raise InvalidInput(f"positions {start} to {stop} are outside the buffer of {self.capacity} tokens")


class ModelBackend(Protocol):
    """A model as reuse sees it. The only implementations import a model library; everything else does not."""

    @property
    def spec(self) -> ModelSpec:
        """Shape and identity, constant over the backend's life."""
        ...

    def buffer(self, capacity: int) -> KVBuffer:
        """Room for a request of ``capacity`` tokens; its contents are undefined, another request's for example."""
        ...

    def forward(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], logits: int
    ) -> torch.Tensor:
        """Run tokens through the model at the given positions, writing their KV into ``buffer`` in place.

        Each token sees what the model lets it see of positions up to its own: KV already in the buffer and that of the
        tokens computed with it. Positions must increase; those from ``buffer.length`` on extend it without a gap.

        Args:
            token_ids: n ids.
            positions: n positions in tokens, strictly increasing.
            logits: for how many of the last tokens to return logits; 0 skips the output layer where it can.

        Returns:
            [logits, vocabulary] in the model's dtype.

        Raises:
            InvalidInput: positions do not increase, leave a gap or exceed the buffer.
        """
        ...

    def forward_first(self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], layers: int) -> None:
        """Run tokens through the first ``layers`` layers only, writing the KV of layers 0 to ``layers`` in place.

        KV of a layer are made from what the layers before it put out, so the pass ends as soon as layer ``layers`` has
        written its own. Later layers and ``buffer.length`` stay as they are.

        Args:
            token_ids, positions: as in forward.
            layers: 0 to n_layers - 1.

        Raises:
            InvalidInput: as forward, or ``layers`` is outside its range.
        """
        ...

    def attended(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], queries: Sequence[int]
    ) -> torch.Tensor:
        """Run tokens as forward does, without logits, and see what some of them attend to.

        Args:
            token_ids, positions: as in forward.
            queries: the positions to watch, increasing, all among ``positions``.

        Returns:
            [queries, tokens in sight] float32: the probability that each key position receives from each query,
            averaged over heads and layers. Rows sum to 1.

        Raises:
            InvalidInput: as forward, or a query is not among the positions.
            UnsupportedModel: the model's attention cannot be watched.
        """
        ...
