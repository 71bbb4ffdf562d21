"""transformers caches over a request's buffer: one writes chosen positions in place, one grows for generation."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvcomm.hf.latent import Plain
from kvcomm.reuse.backend import KVBuffer

PLAIN = Plain()


class EndOfPass(Exception):
    """Ends a forward once the last layer wanted has written its KV."""


class ScatterLayer(DynamicLayer):
    """A layer whose update writes new KV at chosen positions and shows the model everything up to ``length``.

    Shapes: keys and values [1, n_kv_heads, length, head_dim], views of the buffer. With ``last`` the update raises
    EndOfPass after writing. Where KV of the buffer's layer ``number`` is on its way, the update waits for it.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        number: int,
        length: int,
        positions: torch.Tensor | slice,
        before: int,
        last: bool,
        layout: Plain = PLAIN,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        here = slice(number, number + 1)
        keys, values = buffer.keys[here, :, :length], buffer.values[here, :, :length]
        self.keys, self.values = self._keys, self._values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.positions, self.before, self.last, self.layout = positions, before, last, layout
        self.buffer, self.number = buffer, number

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.buffer.before_layer is not None:
            self.buffer.before_layer(self.number)
        keys, values = self.layout.pack(key_states, value_states)
        self._keys[:, :, self.positions] = keys
        self._values[:, :, self.positions] = values
        if self.buffer.after_layer is not None:
            self.buffer.after_layer(self.number)
        if self.last:
            raise EndOfPass
        return self.layout.unpack(self._keys, self._values)

    def get_seq_length(self) -> int:
        return self.before


def scatter_cache(
    buffer: KVBuffer,
    positions: torch.Tensor | slice,
    before: int,
    length: int,
    last: int | None = None,
    layout: Plain = PLAIN,
) -> Cache:
    """A cache for one forward over ``positions`` (int64 [n], or a slice) with ``length`` tokens in sight afterwards.

    ``before`` is the first of the positions: what transformers takes for the cache's length when it makes a mask.
    ``last`` is the layer whose update ends the forward with EndOfPass, if any.
    """
    layers = range(buffer.keys.shape[0])
    return Cache(layers=[ScatterLayer(buffer, n, length, positions, before, n == last, layout) for n in layers])


class BufferLayer(DynamicLayer):
    """A growing layer that appends inside preallocated memory for as long as it can.

    When generation has several rows for the one prompt (beams, several sequences), reorders or resets them, or the room
    is used up, it goes on as an ordinary DynamicLayer with tensors of its own. It keeps every token of a sliding layer;
    the model's mask hides those outside the window. Latents are held as kvcomm holds them, and unpacked for the model.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int, layout: Plain = PLAIN) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room_keys, self.room_values, self.layout = keys, values, layout
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    @property
    def in_place(self) -> bool:
        """Whether keys and values still are the preallocated memory."""
        if self.keys is None:
            return False
        return self.keys.numel() == 0 or self.keys.data_ptr() == self.room_keys.data_ptr()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_states, value_states = self.layout.pack(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        rows = key_states.shape[0]
        if not self.in_place or rows != self.room_keys.shape[0] or stop > self.room_keys.shape[2]:
            if self.keys is not None and self.values is not None and rows != self.keys.shape[0] == 1:
                self.keys, self.values = self.keys.expand(rows, -1, -1, -1), self.values.expand(rows, -1, -1, -1)
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return self.layout.unpack(keys, values)
        self.room_keys[:, :, start:stop] = key_states
        self.room_values[:, :, start:stop] = value_states
        self.keys, self.values = self.room_keys[:, :, :stop], self.room_values[:, :, :stop]
        return self.layout.unpack(self.keys, self.values)


def generation_cache(buffer: KVBuffer, layout: Plain = PLAIN) -> Cache:
    """An ordinary transformers Cache holding the buffer's filled part, for model.generate."""
    return Cache(
        layers=[
            BufferLayer(buffer.keys[n : n + 1], buffer.values[n : n + 1], buffer.length, layout)
            for n in range(buffer.keys.shape[0])
        ]
    )
