"""Rotation of keys in plain torch: right everywhere, and on a CPU near the speed of memory.

A model's rotated key is ``a * R(p) * k`` (Su et al. 2021, arXiv 2104.09864, section 3.2.2; ``a`` is the attention
factor of YaRN and LongRoPE). Here only ``R`` is put on or taken off; ``a`` stays where it is. Angles, cosines and sines
are float32, formed as the models form them: ``position.float() * inv_freq``.

The work is cut into blocks that fit a core's cache, so that each key is read and each result is written once. Layers
with the same rotation share one table of cosines and sines.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvcomm.rope.spec import LayerRope, RopeSpec

_BLOCK_BYTES_CPU = 3 << 19  # input and output of a block stay in the second-level cache
_BLOCK_TOKENS_CPU = 1024
_BLOCK_BYTES_OTHER = 64 << 20  # elsewhere a launch costs more than a pass through memory


class _Table(NamedTuple):
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
        scratch: dict[str, Tensor] = {}
        for tokens, group in _blocks(keys, spec):
            tables: dict[LayerRope, _Table] = {}
            for rope, layers in group:
                here = (layers, slice(None), tokens)
                part = None if offset is None else offset[here]
                if rope is not None and rope not in tables:
                    tables[rope] = _table(positions[tokens], rope, inverse)
                _turn_block(keys[here], part, out[here], rope, None if rope is None else tables[rope], scratch)
        return out


def _blocks(keys: Tensor, spec: RopeSpec) -> Iterator[tuple[slice, list[tuple[LayerRope | None, slice]]]]:
    """Slices of tokens, each with slices of adjacent layers of one rotation; token slices are the outer loop, so that
    the table of a slice is still in the cache for the next layers.
    """
    _, heads, count, dim = keys.shape
    on_cpu = keys.device.type == "cpu"
    per_token = max(1, heads * dim * 4)
    budget = _BLOCK_BYTES_CPU if on_cpu else _BLOCK_BYTES_OTHER
    tokens = max(1, min(budget // per_token, count, _BLOCK_TOKENS_CPU if on_cpu else count))
    together = max(1, budget // (per_token * tokens))
    group: list[tuple[LayerRope | None, slice]] = []
    first = 0
    for rope, run in groupby(spec.layers):
        last = first + len(list(run))
        group += [(rope, slice(start, min(start + together, last))) for start in range(first, last, together)]
        first = last
    for start in range(0, count, tokens):
        yield slice(start, min(start + tokens, count)), group


def _table(positions: Tensor, rope: LayerRope, inverse: bool) -> _Table:
    angles = positions.float()[:, None] * rope.frequencies.to(positions.device)  # [T, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    if inverse:
        sin.neg_()
    if rope.interleaved:
        return _Table(torch.complex(cos, sin), sin, sin)
    return _Table(torch.cat((cos, cos), dim=-1), sin, -sin)


def _turn_block(
    keys: Tensor,
    offset: Tensor | None,
    out: Tensor,
    rope: LayerRope | None,
    table: _Table | None,
    scratch: dict[str, Tensor],
) -> None:
    """One block, [l, heads, t, head_dim]; ``scratch`` keeps float32 buffers from one block to the next."""
    source, target = keys, out
    if offset is not None:
        source = _buffer(scratch, "source", keys)
        if keys.dtype == offset.dtype == torch.float32:
            torch.add(keys, offset, out=source)
        else:  # add in float32: a sum of two 16-bit tensors would be rounded on the way
            source.copy_(keys).add_(offset)
    elif keys.dtype != torch.float32 and rope is not None:
        source = _buffer(scratch, "source", keys).copy_(keys)
    if rope is None or table is None:
        out.copy_(source)
        return
    if out.dtype != torch.float32:
        target = _buffer(scratch, "target", keys)
    width = rope.rotary_dim
    if rope.interleaved:
        _turn_interleaved(source[..., :width], target[..., :width], table, scratch)
    else:
        _turn_halves(source[..., :width], target[..., :width], table)
    if width < rope.head_dim:
        target[..., width:].copy_(source[..., width:])
    if target is not out:
        out.copy_(target)


def _turn_halves(source: Tensor, target: Tensor, table: _Table) -> None:
    half = table.sin.shape[-1]
    torch.mul(source, table.cos, out=target)
    target[..., :half].addcmul_(source[..., half:], table.minus_sin)
    target[..., half:].addcmul_(source[..., :half], table.sin)


def _turn_interleaved(source: Tensor, target: Tensor, table: _Table, scratch: dict[str, Tensor]) -> None:
    """A pair is a complex number, and the rotation one complex product."""
    if not _pairs_adjacent(source):
        source = _buffer(scratch, "pairs in", source).copy_(source)
    into = target if _pairs_adjacent(target) else _buffer(scratch, "pairs out", target)
    torch.mul(_as_complex(source), table.cos, out=_as_complex(into))
    if into is not target:
        target.copy_(into)


def _pairs_adjacent(keys: Tensor) -> bool:
    """Whether the memory can be read as complex numbers in place."""
    even = all(stride % 2 == 0 for stride in keys.stride()[:-1]) and keys.storage_offset() % 2 == 0
    return even and keys.stride(-1) == 1


def _as_complex(keys: Tensor) -> Tensor:
    return torch.view_as_complex(keys.view(*keys.shape[:-1], -1, 2))


def _buffer(scratch: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A float32 buffer of ``like``'s shape, kept under ``name`` and reused by every block that fits it."""
    held = scratch.get(name)
    if held is None or held.numel() < like.numel():
        held = scratch[name] = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
    return held[: like.numel()].view(like.shape)
