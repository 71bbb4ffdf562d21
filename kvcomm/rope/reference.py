"""Rotation of keys in plain torch: right everywhere, and on a CPU near the speed of memory.

A model's rotated key is ``a * R(p) * k`` (Su et al. 2021, arXiv 2104.09864, section 3.2.2; ``a`` is the attention
factor of YaRN and LongRoPE). Here only ``R`` is put on or taken off; ``a`` stays where it is. Angles, cosines and sines
are float32, formed as the models form them: ``position.float() * inv_freq``.

The work is cut into blocks that fit a core's cache, so that each key is read and each result is written once. Layers
with the same rotation share one table of cosines and sines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvcomm.rope.spec import LayerRope, RopeSpec

_BLOCK_BYTES_CPU = 3 << 19  # input and output of a block stay in the second-level cache
_BLOCK_TOKENS_CPU = 1024
_BLOCK_BYTES_OTHER = 64 << 20  # elsewhere a launch costs more than a pass through memory


Scratch = dict[str, Tensor]
"""Buffers by name, kept from one block to the next."""


class Table(NamedTuple):
    """Cosines and sines of T positions, in the form that the pairing wants."""

    cos: Tensor  # halves: [T, rotary_dim] with the cosines twice; interleaved: complex [T, rotary_dim / 2]
    sin: Tensor  # [T, rotary_dim / 2]
    minus_sin: Tensor  # [T, rotary_dim / 2]


def rotate(keys: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None = None) -> Tensor:
    """Put ``R(positions)`` on keys. Arguments as for ``turn``."""
    return turn(keys, positions, spec, out)


def unrotate(keys: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None = None) -> Tensor:
    """Take ``R(positions)`` off keys. Arguments as for ``turn``."""
    return turn(keys, positions, spec, out, inverse=True)


def turn(
    keys: Tensor,
    positions: Tensor,
    spec: RopeSpec,
    out: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """``R(positions) (keys + offset)``, or with ``inverse`` the opposite rotation, rounded once to the keys' dtype.

    Args:
        keys: [layers, kv heads, T, head_dim], floating.
        positions: [T], int64, in tokens.
        spec: the rotation of each of the layers.
        out: where to write, shape and dtype of ``keys``, any strides, not overlapping ``keys`` or ``offset``.
        offset: shape of ``keys``, any floating dtype.

    Returns:
        ``out``, or a new tensor where it is None. Inputs are not checked here; see ``kvcomm.rope.ops``.
    """
    with torch.no_grad():
        if out is None:
            out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
        scratch: Scratch = {}
        for tokens, group in blocks(keys, spec.layers):
            tables: dict[LayerRope, Table] = {}
            for rope, layers in group:
                here = (layers, slice(None), tokens)
                part = None if offset is None else offset[here]
                if rope is not None and rope not in tables:
                    tables[rope] = table_of(positions[tokens], rope, inverse)
                turn_block(keys[here], part, out[here], rope, None if rope is None else tables[rope], scratch)
        return out


def blocks(
    keys: Tensor, ropes: Sequence[LayerRope | None], bytes_on_cpu: int = _BLOCK_BYTES_CPU
) -> Iterator[tuple[slice, list[tuple[LayerRope | None, slice]]]]:
    """Slices of tokens, each with slices of adjacent layers of one rotation; token slices are the outer loop, so that
    the table of a slice is still in the cache for the next layers.

    Args:
        keys: [layers, kv heads, T, head_dim]; ``ropes`` has one entry a layer.
        bytes_on_cpu: of a block's keys in float32.
    """
    _, heads, count, dim = keys.shape
    on_cpu = keys.device.type == "cpu"
    per_token = max(1, heads * dim * 4)
    budget = bytes_on_cpu if on_cpu else _BLOCK_BYTES_OTHER
    tokens = max(1, min(budget // per_token, count, _BLOCK_TOKENS_CPU if on_cpu else count))
    together = max(1, budget // (per_token * tokens))
    group: list[tuple[LayerRope | None, slice]] = []
    first = 0
    for rope, run in groupby(ropes):
        last = first + len(list(run))
        group += [(rope, slice(start, min(start + together, last))) for start in range(first, last, together)]
        first = last
    for start in range(0, count, tokens):
        yield slice(start, min(start + tokens, count)), group


def table_of(positions: Tensor, rope: LayerRope, inverse: bool = False) -> Table:
    """The table of int64 positions [T] under one rotation, or its opposite."""
    angles = positions.float()[:, None] * rope.frequencies.to(positions.device)  # [T, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin.neg_()
    if rope.interleaved:
        return Table(torch.complex(cos, sin), sin, sin)
    return Table(torch.cat((cos, cos), dim=-1), sin, -sin)


def turn_block(
    keys: Tensor,
    offset: Tensor | None,
    out: Tensor,
    rope: LayerRope | None,
    table: Table | None,
    scratch: Scratch,
) -> None:
    """One block, [l, heads, t, head_dim]; ``scratch`` keeps float32 buffers from one block to the next."""
    source, target = keys, out
    if offset is not None:
        source = buffer(scratch, "source", keys.shape, keys.device)
        if keys.dtype == offset.dtype == torch.float32:
            torch.add(keys, offset, out=source)
        else:  # add in float32: a sum of two 16-bit tensors would be rounded on the way
            source.copy_(keys).add_(offset)
    elif keys.dtype != torch.float32 and rope is not None:
        source = buffer(scratch, "source", keys.shape, keys.device).copy_(keys)
    if rope is None or table is None:
        out.copy_(source)
        return
    if out.dtype != torch.float32:
        target = buffer(scratch, "target", keys.shape, keys.device)
    width = rope.rotary_dim
    if rope.interleaved:
        _turn_interleaved(source[..., :width], target[..., :width], table, scratch)
    else:
        _turn_halves(source[..., :width], target[..., :width], table)
    if width < rope.head_dim:
        target[..., width:].copy_(source[..., width:])
    if target is not out:
        out.copy_(target)


def _turn_halves(source: Tensor, target: Tensor, table: Table) -> None:
    half = table.sin.shape[-1]
    torch.mul(source, table.cos, out=target)
    target[..., :half].addcmul_(source[..., half:], table.minus_sin)
    target[..., half:].addcmul_(source[..., :half], table.sin)


def _turn_interleaved(source: Tensor, target: Tensor, table: Table, scratch: Scratch) -> None:
    """A pair is a complex number, and the rotation one complex product."""
    if not _pairs_adjacent(source):
        source = buffer(scratch, "pairs in", source.shape, source.device).copy_(source)
    into = target if _pairs_adjacent(target) else buffer(scratch, "pairs out", target.shape, target.device)
    torch.mul(_as_complex(source), table.cos, out=_as_complex(into))
    if into is not target:
        target.copy_(into)


def _pairs_adjacent(keys: Tensor) -> bool:
    """Whether the memory can be read as complex numbers in place."""
    even = all(stride % 2 == 0 for stride in keys.stride()[:-1]) and keys.storage_offset() % 2 == 0
    return even and keys.stride(-1) == 1


def _as_complex(keys: Tensor) -> Tensor:
    return torch.view_as_complex(keys.view(*keys.shape[:-1], -1, 2))


def buffer(
    scratch: Scratch, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Memory for a tensor of this shape, kept under ``name`` and reused by every block that fits it."""
    count = math.prod(shape)
    held = scratch.get(name)
    if held is None or held.numel() < count:
        held = scratch[name] = torch.empty(count, dtype=dtype, device=device)
    return held[:count].view(*shape)
