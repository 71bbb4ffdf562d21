"""What the kernels move: where KV lies, what its int8 codes are worth, and what is added to it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcomm.errors import InvalidInput

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Layers = Tensor | Sequence[Tensor]
"""A tensor [L, ...] or one tensor a layer, all with the same shape, strides, dtype and device."""


@dataclass(frozen=True, eq=False)
class KVView:
    """Keys and values of T tokens in all layers, where they lie. Build it with ``contiguous`` or ``paged``.

    Attributes:
        keys: a layer is [kv heads, T, head_dim], or paged [blocks, block size, kv heads, head_dim].
        values: as ``keys``, or None where only keys move.
        tokens: T.
        block_table: int32 or int64 [n], the blocks of one sequence in order; None where the KV is not paged.
        start: the place in that sequence of the first of the T tokens.

    Raises:
        InvalidInput: the tensors do not agree, or tokens lie outside the blocks.
    """

    keys: Layers
    values: Layers | None
    tokens: int
    block_table: Tensor | None = None
    start: int = 0

    @classmethod
    def contiguous(cls, keys: Layers, values: Layers | None = None) -> KVView:
        """KV [L, kv heads, T, head_dim], any strides: a segment's own tensors, or a slice of a request's buffer."""
        return cls(keys, values, int(keys[0].shape[1]) if len(keys) and keys[0].dim() == 3 else 0)

    @classmethod
    def paged(cls, keys: Layers, values: Layers | None, block_table: Tensor, tokens: int, start: int = 0) -> KVView:
        """KV of ``tokens`` tokens from place ``start`` of the sequence whose blocks ``block_table`` names.

        No two of the places written may be the same: a block must not occur twice in the table.
        """
        return cls(keys, values, tokens, block_table, start)

    def __post_init__(self) -> None:
        wanted = "[L, kv heads, T, head_dim]" if self.block_table is None else "[L, blocks, size, kv heads, head_dim]"
        for name, layers in (("keys", self.keys), ("values", self.values)):
            if layers is None:
                continue
            if not len(layers) or layers[0].dim() != (3 if self.block_table is None else 4):
                raise InvalidInput(
                    f"{name} are not {wanted}; a list holds one such tensor a layer, without the first L"
                )
            first = self.first_keys
            for layer in layers if not isinstance(layers, Tensor) else (layers[0],):
                same = layer.shape == first.shape and layer.stride() == first.stride()
                if not same or layer.dtype != first.dtype or layer.device != first.device:
                    raise InvalidInput(
                        f"{name} {list(layer.shape)} {layer.dtype} with strides {layer.stride()} beside keys "
                        f"{list(first.shape)} {first.dtype} with {first.stride()}: all layers must be laid out alike"
                    )
        if self.values is not None and len(self.values) != len(self.keys):
            raise InvalidInput(f"keys have {len(self.keys)} layers and values {len(self.values)}; pass all of both")
        if self.first_keys.dtype not in (*FLOATS, torch.int8):
            raise InvalidInput(f"KV is {self.first_keys.dtype}; pass float32, bfloat16, float16 or int8 codes")
        if self.block_table is not None:
            self._check_table(self.block_table)

    def _check_table(self, table: Tensor) -> None:
        if table.dim() != 1 or table.dtype not in (torch.int32, torch.int64) or table.device != self.device:
            raise InvalidInput(
                f"block_table is {list(table.shape)} {table.dtype} on {table.device}; pass int32 or int64 [n] on "
                f"{self.device}"
            )
        blocks, size = self.first_keys.shape[:2]
        if self.tokens < 0 or self.start < 0 or self.start + self.tokens > table.numel() * size:
            raise InvalidInput(
                f"{self.tokens} tokens from {self.start} do not fit {table.numel()} blocks of {size}; name more blocks"
            )
        if table.numel():
            low, high = (int(bound) for bound in table.aminmax())
            if low < 0 or high >= blocks:
                raise InvalidInput(f"block_table names blocks {low} to {high} of a cache that has {blocks}")

    @property
    def first_keys(self) -> Tensor:
        """The first layer's keys."""
        return self.keys[0]

    @property
    def first_values(self) -> Tensor:
        """The first layer's values, or its keys where there are none."""
        return self.first_keys if self.values is None else self.values[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.first_keys.dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values."""
        return self.first_keys.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[L, kv heads, T, head_dim], whatever the layout."""
        first = self.first_keys
        return len(self.keys), int(first.shape[-3 if self.block_table is None else -2]), self.tokens, first.shape[-1]

    @property
    def block_size(self) -> int:
        """Tokens of a block, or 0 where the KV is not paged."""
        return 0 if self.block_table is None else int(self.first_keys.shape[1])

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from block to block, head to head, token to token and dimension to dimension."""
        if self.block_table is None:
            head, token, dim = self.first_keys.stride()
            return 0, head, token, dim
        block, token, head, dim = self.first_keys.stride()
        return block, head, token, dim

    def distances(self) -> tuple[int, ...]:
        """Elements from the first layer to each, keys and values in turn: 2 L numbers."""
        keys = _distances(self.keys)
        values = keys if self.values is None else _distances(self.values)
        return tuple(number for both in zip(keys, values, strict=True) for number in both)


def _distances(layers: Layers) -> list[int]:
    if isinstance(layers, Tensor):
        return [index * layers.stride(0) for index in range(len(layers))]
    first, size = layers[0].data_ptr(), layers[0].element_size()
    bytes_between = [layer.data_ptr() - first for layer in layers]
    if any(distance % size for distance in bytes_between):
        raise InvalidInput(f"layers lie at addresses that are not multiples of {size} bytes apart; align them")
    return [distance // size for distance in bytes_between]


@dataclass(frozen=True, eq=False)
class Scales:
    """What int8 codes are multiplied by.

    Attributes:
        keys, values: float32, [L, kv heads, T, 1] for a number a token, or [L, kv heads, 1, head_dim] for one a
            dimension.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class AddedOffset:
    """An offset as it is, added in float32.

    Attributes:
        kv: contiguous KV of the *last* layers; those before (usually the first, whose KV depends on the token alone)
            have none.
        factor: None, or float32 [offset layers, 2], by which keys and values of the offset are multiplied.
    """

    kv: KVView
    factor: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LinearMap:
    """An offset to be computed: y = x W + intercept[bucket of the token], x = [base keys, base values].

    Attributes:
        weights: W, [offset layers, kv heads, 2 head_dim, 2 head_dim], of the last layers, float32 or a 16-bit dtype (x
            is then rounded to it too). Tensor cores want it stored by columns: ``w.mT.contiguous().mT``, once.
        intercept: float32 [offset layers, kv heads, buckets, 2 head_dim].
        buckets: int32 or int64 [T], each below the number of buckets.
        factor: as for ``AddedOffset``.
    """

    weights: Tensor
    intercept: Tensor
    buckets: Tensor
    factor: Tensor | None = None
