"""Base + linear offset into a request's cache in plain torch, near the speed of a CPU's memory and matrix units.

What ``kvcomm.rope.move.place`` does by kernel. The work is cut into blocks that fit a core's cache: each base is read
once, each result written once, and the offset never lies in memory as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcomm.rope import reference
from kvcomm.rope.spec import LayerRope, RopeSpec
from kvcomm.rope.view import LinearMap

_BLOCK_BYTES = 3 << 18  # of keys in float32; with values, x, y and the results it is eight times as much


def place_linear(
    keys: Tensor,
    values: Tensor,
    target_keys: Tensor,
    target_values: Tensor,
    positions: Tensor,
    spec: RopeSpec,
    offset: LinearMap,
) -> None:
    """Write base + offset, keys turned to ``positions``; numbers are float32 on the way and rounded at the end.

    Args:
        keys, values: the base in the unrotated frame, [layers, kv heads, T, head_dim], floating.
        target_keys, target_values: where to write, same shape and dtype, any strides, no memory shared with the base.
        positions: [T], int64, in tokens.
        spec: the rotation of each layer.
        offset: of the last layers; those before have none. With weights of 16 bits the product takes x rounded to them.

    Inputs are not checked here; see ``kvcomm.reuse.splice``.
    """
    plain = keys.shape[0] - offset.weights.shape[0]
    with torch.no_grad():
        target_values[:plain].copy_(values[:plain])
        if plain:
            reference.turn(keys[:plain], positions, RopeSpec(spec.layers[:plain]), target_keys[:plain])
        ropes = spec.layers[plain:]
        keys, values, target_keys, target_values = (part[plain:] for part in (keys, values, target_keys, target_values))
        scratch: reference.Scratch = {}
        factor = torch.ones(len(ropes), 2, device=keys.device) if offset.factor is None else offset.factor
        factor = factor[:, :, None, None, None]
        for tokens, group in reference.blocks(keys, ropes, _BLOCK_BYTES):
            tables: dict[LayerRope, reference.Table] = {}
            for rope, layers in group:
                here = (layers, slice(None), tokens)
                k, v = keys[here], values[here]
                more_k, more_v = _offset(k, v, offset, layers, tokens, scratch)
                source = reference.buffer(scratch, "corrected", k.shape, k.device)
                torch.addcmul(k, more_k, factor[layers, 0], out=source)
                torch.addcmul(v, more_v, factor[layers, 1], out=target_values[here])
                if rope is not None and rope not in tables:
                    tables[rope] = reference.table_of(positions[tokens], rope)
                table = None if rope is None else tables[rope]
                reference.turn_block(source, None, target_keys[here], rope, table, scratch)


def _offset(
    keys: Tensor, values: Tensor, offset: LinearMap, layers: slice, tokens: slice, scratch: reference.Scratch
) -> tuple[Tensor, Tensor]:
    """What a block's keys and values lack, before the factor: [l, kv heads, t, head_dim] float32 each."""
    count, heads, length, dim = keys.shape
    shape = (count, heads, length, 2 * dim)
    weights = offset.weights[layers].flatten(0, 1)
    x = reference.buffer(scratch, "x", shape, keys.device, weights.dtype)
    y = reference.buffer(scratch, "y", shape, keys.device)
    x[..., :dim].copy_(keys)
    x[..., dim:].copy_(values)
    torch.index_select(offset.intercept[layers], 2, offset.buckets[tokens], out=y)
    if weights.dtype == torch.float32:
        y.flatten(0, 1).baddbmm_(x.flatten(0, 1), weights)
    else:
        product = reference.buffer(scratch, "product", shape, keys.device, weights.dtype)
        torch.bmm(x.flatten(0, 1), weights, out=product.flatten(0, 1))
        y += product
    return y[..., :dim], y[..., dim:]
