"""Moving KV between a segment's own frame and a request's buffer: one rotation each way, straight into place."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvcomm import rope
from kvcomm.errors import InvalidInput
from kvcomm.reuse import fused
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.rope.ops import check_positions
from kvcomm.rope.place import place_linear
from kvcomm.rope.view import LinearMap
from kvcomm.types import SegmentKV


def positions_of(start: int, length: int, device: torch.device) -> torch.Tensor:
    """Positions start, start + 1, ... as int64 [length]."""
    return torch.arange(start, start + length, dtype=torch.int64, device=device)


def splice(
    buffer: KVBuffer, spec: ModelSpec, base: SegmentKV, start: int, offset: SegmentKV | LinearMap | None = None
) -> None:
    """Write base + offset into ``buffer`` at ``start``, rotating the keys once to their new positions.

    ``buffer.length`` is the caller's to set, once everything up to it is filled.

    Args:
        base: unrotated KV, [n_layers, n_kv_heads, T, head_dim].
        offset: what the new context adds, in the same frame and of the base's shape, or a linear map of the base, or
            None. In layer 0 it is zero: keys and values of the first layer depend on the token alone.

    Raises:
        InvalidInput: base does not fit the model, offset does not fit base, or the range does not fit the buffer.
    """
    base.check(spec.fingerprint, len(base))
    _splice(buffer, spec, base, start, offset, slice(None))


def splice_layer(
    buffer: KVBuffer, spec: ModelSpec, base: SegmentKV, layer: int, start: int, offset: SegmentKV | LinearMap | None
) -> None:
    """As ``splice``, of one layer alone.

    Args:
        base: that layer's, [1, n_kv_heads, T, head_dim].
        offset: of all layers, or None.
    """
    rotation = spec.rope.layers[layer : layer + 1]
    if isinstance(offset, LinearMap):
        offset = _layer_of(offset, layer - (len(spec.rope.layers) - len(offset.weights)))
    elif offset is not None:
        offset = SegmentKV(offset.keys[layer : layer + 1], offset.values[layer : layer + 1])
    _splice(buffer, replace(spec, rope=replace(spec.rope, layers=rotation)), base, start, offset,
            slice(layer, layer + 1))  # fmt: skip


def _layer_of(offset: LinearMap, layer: int) -> LinearMap | None:
    """One layer of a linear map, counted from its first; None before that."""
    if layer < 0:
        return None
    here = slice(layer, layer + 1)
    factor = None if offset.factor is None else offset.factor[here]
    return LinearMap(offset.weights[here], offset.intercept[here], offset.buckets, factor)


def _splice(
    buffer: KVBuffer, spec: ModelSpec, base: SegmentKV, start: int, offset: SegmentKV | LinearMap | None, layers: slice
) -> None:
    """``splice`` into some layers of the buffer; base, offset and the spec's rotations are of these alone."""
    length = len(base)
    buffer.check_range(start, start + length)
    if not length:
        return
    if base.keys.device != buffer.keys.device:
        raise InvalidInput(
            f"the base is on {base.keys.device}, the request on {buffer.keys.device}; use a pool of the model's device"
        )
    positions = positions_of(start, length, base.keys.device)
    target_k = buffer.keys[layers, :, start : start + length]
    target_v = buffer.values[layers, :, start : start + length]
    if isinstance(offset, SegmentKV) and offset.keys.shape != base.keys.shape:
        raise InvalidInput(f"offset {tuple(offset.keys.shape)} does not fit its base {tuple(base.keys.shape)}")
    if fused.handles(spec, buffer.keys.device):
        fused.place(base, target_k, target_v, positions, spec, offset)
        return
    if isinstance(offset, LinearMap):
        _check_map(offset, base)
        check_positions(length, positions.device, positions, spec.rope)
        place_linear(base.keys, base.values, target_k, target_v, positions, spec.rope, offset)
        return
    if offset is None:
        target_v.copy_(base.values)
        rope.rotate(base.keys, positions, spec.rope, out=target_k)
        return
    torch.add(base.values, offset.values, out=target_v)
    rope.rotate_add(base.keys, offset.keys, positions, spec.rope, out=target_k)


def _check_map(offset: LinearMap, base: SegmentKV) -> None:
    layers, heads, tokens, dim = base.keys.shape
    wide = (heads, 2 * dim, 2 * dim)
    fits = tuple(offset.weights.shape[1:]) == wide and tuple(offset.buckets.shape) == (tokens,)
    if not fits or len(offset.weights) > layers or offset.weights.device != base.keys.device:
        raise InvalidInput(
            f"a linear map of weights {tuple(offset.weights.shape)} for {tuple(offset.buckets.shape)} tokens on "
            f"{offset.weights.device} does not fit its base {tuple(base.keys.shape)} on {base.keys.device}"
        )


def cut_layer(buffer: KVBuffer, spec: ModelSpec, layer: int, start: int, stop: int) -> SegmentKV:
    """As ``cut``, of one layer alone, [1, n_kv_heads, T, head_dim]; what is filled is the caller's to know."""
    here = slice(layer, layer + 1)
    keys, values = buffer.keys[here, :, start:stop], buffer.values[here, :, start:stop]
    only = replace(spec.rope, layers=spec.rope.layers[here])
    return SegmentKV(rope.unrotate(keys, positions_of(start, stop - start, keys.device), only), values.clone())


def cut(buffer: KVBuffer, spec: ModelSpec, start: int, stop: int) -> SegmentKV:
    """Copy positions ``start`` to ``stop`` out of ``buffer`` into the unrotated frame, in one new allocation.

    Raises:
        InvalidInput: the range is not filled.
    """
    if not 0 <= start <= stop <= buffer.length:
        raise InvalidInput(f"positions {start} to {stop} are not all filled: the buffer holds {buffer.length} tokens")
    keys = buffer.keys[:, :, start:stop]
    if stop > start and fused.handles(spec, keys.device):
        return fused.cut(keys, buffer.values[:, :, start:stop], positions_of(start, stop - start, keys.device), spec)
    if stop > start:
        unrotated = rope.unrotate(keys, positions_of(start, stop - start, keys.device), spec.rope)
    else:
        unrotated = keys.clone()
    return SegmentKV(unrotated, buffer.values[:, :, start:stop].clone())
