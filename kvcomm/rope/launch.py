"""From checked arguments to kernel launches: tables of cosines and sines, tiles, grids and arguments by name.

A launch is a value, so that the program that compiles kernels ahead of time sees exactly what would run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvcomm.rope.spec import LayerRope, RopeSpec
from kvcomm.rope.view import AddedOffset, KVView, LinearMap, Scales

_TILE_BYTES = 8192  # of each of keys and values in a tile: more, with offset, table and addresses, spills registers
_PROGRAMS = 1024  # enough to fill any card; with fewer tiles and layers, heads are shared out too
_PLANS_KEPT = 64


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: the Triton function.
        grid: programs along three axes.
        arguments: tensors and integers, by name.
        constants: compile-time constants, by name.
        warps, stages: Triton's num_warps and num_stages.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Tensor | int]
    constants: Mapping[str, int | bool | str]
    warps: int = 4
    stages: int = 2

    def run(self) -> None:
        """Queue it on the current stream of the tensors' device."""
        device = next(value.device for value in self.arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # else Triton's interpreter
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int | bool]:
        """Triton's own: a product and its sum may be fused, which rounds once less."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclass(frozen=True, eq=False)
class _Group:
    """Layers that one launch can do: the same number of pairs, paired alike. Nearly every model is one group.

    Attributes:
        layer_ids: int32 [g].
        table_ids: int32 [L], the table of each layer, -1 without rope.
        frequencies: float32 [tables, PAIRS].
    """

    layer_ids: Tensor
    table_ids: Tensor
    frequencies: Tensor
    interleaved: bool


_plans: OrderedDict[tuple[str, int, torch.device], list[_Group]] = OrderedDict()


def _groups(spec: RopeSpec, head_dim: int, device: torch.device) -> list[_Group]:
    key = (spec.digest, head_dim, device)
    if key not in _plans:
        _plans[key] = _group_layers(spec, head_dim, device)
        if len(_plans) > _PLANS_KEPT:
            _plans.popitem(last=False)
    return _plans[key]


def _group_layers(spec: RopeSpec, head_dim: int, device: torch.device) -> list[_Group]:
    """Layers without rope go with the first group; a model without any is turned by no table."""
    kinds = list(dict.fromkeys((r.rotary_dim, r.interleaved) for r in spec.layers if r is not None))
    groups = []
    for number, (width, interleaved) in enumerate(kinds or [(head_dim // 2 * 2, False)]):
        tables: dict[LayerRope, int] = {}
        layers, table_ids = [], [-1] * len(spec.layers)
        for index, rope in enumerate(spec.layers):
            if rope is None and number == 0:
                layers.append(index)
            elif rope is not None and (rope.rotary_dim, rope.interleaved) == (width, interleaved):
                layers.append(index)
                table_ids[index] = tables.setdefault(rope, len(tables))
        rows = [rope.frequencies for rope in tables] or [torch.zeros(width // 2)]
        ids = torch.tensor(layers, dtype=torch.int32), torch.tensor(table_ids, dtype=torch.int32)
        groups.append(_Group(ids[0].to(device), ids[1].to(device), torch.stack(rows).to(device), interleaved))
    return groups


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def launches(
    source: KVView,
    target: KVView,
    positions: Tensor,
    spec: RopeSpec,
    *,
    inverse: bool = False,
    scales: Scales | None = None,
    offset: AddedOffset | LinearMap | None = None,
    hip: bool = torch.version.hip is not None,
) -> list[Launch]:
    """The launches, one for each group of layers, that write ``source`` with its offset, turned, to ``target``.

    Arguments are those of ``kvcomm.rope.move``, checked; ``hip`` says that they are for an AMD card. Without tokens or
    heads there is nothing to launch.
    """
    layers, heads, tokens, dim = source.shape
    if not layers * heads * tokens:
        return []
    result = []
    for group in _groups(spec, dim, source.device):
        angles = positions.float()[None, :, None] * group.frequencies[:, None]  # [tables, T, PAIRS]
        cos, sin = angles.cos(), angles.sin()
        pairs = int(group.frequencies.shape[1])
        arguments = {
            **_place("in", source, "keys", "values"),
            **_place("out", target, "out_keys", "out_values"),
            **_scales(scales, source),
            "cos": cos,
            "sin": sin.neg_() if inverse else sin,
            "layer_ids": group.layer_ids,
            "table_ids": group.table_ids,
            "count": tokens,
            "heads": heads,
        }
        constants: dict[str, int | bool | str] = {
            "D": dim,
            "W": padded(dim),
            "PAIRS": pairs,
            "P": padded(pairs),
            "REST": padded(dim - 2 * pairs) if dim > 2 * pairs else 0,
            "INTERLEAVED": group.interleaved,
            "SCALED_K": 0 if scales is None else 1 if scales.keys.shape[3] == 1 else 2,
            "SCALED_V": 0 if scales is None else 1 if scales.values.shape[3] == 1 else 2,
            "IN_PAGE": source.block_size,
            "OUT_PAGE": target.block_size,
            "IN_ALIGN": _alignment(source),
            "OUT_ALIGN": _alignment(target),
        }
        if isinstance(offset, LinearMap):
            result.append(_linear(arguments, constants, offset, source, len(group.layer_ids), hip))
        else:
            constants["VALUES"] = source.values is not None
            result.append(_plain(arguments, constants, offset, source, len(group.layer_ids)))
    return result


def padded(width: int) -> int:
    """The tile's width for ``width`` dimensions: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def _plain(
    arguments: dict[str, Tensor | int],
    constants: dict[str, int | bool | str],
    offset: AddedOffset | None,
    source: KVView,
    layers: int,
) -> Launch:
    from kvcomm.rope.triton import move_kernel

    _, heads, tokens, _ = source.shape
    added = source if offset is None else offset.kv  # without an offset these are not read
    _, head, token, dim = added.strides
    factor = None if offset is None else offset.factor
    arguments |= {
        "offset_keys": added.first_keys,
        "offset_values": added.first_values,
        "offset_layers": _on_device(added.distances(), source.device),
        "offset_head": head,
        "offset_token": token,
        "offset_dim": dim,
        "factor": arguments["cos"] if factor is None else factor,
        "skip": len(source.keys) - len(added.keys),
    }
    size = max(source.dtype.itemsize, added.dtype.itemsize, 2)
    width = max(int(constants["W"]), padded(2 * int(constants["P"]) + int(constants["REST"])))
    block = max(1, _TILE_BYTES // (size * width))
    tiles = -(-tokens // block)
    shares = min(heads, max(1, _PROGRAMS // (tiles * layers)))
    arguments["heads_each"] = -(-heads // shares)
    constants |= {"OFFSET": offset is not None, "FACTOR": factor is not None, "OFFSET_ALIGN": _alignment(added)}
    constants["B"] = block
    return Launch(move_kernel, (tiles, layers, -(-heads // int(arguments["heads_each"]))), arguments, constants)


def _linear(
    arguments: dict[str, Tensor | int],
    constants: dict[str, int | bool | str],
    offset: LinearMap,
    source: KVView,
    layers: int,
    hip: bool,
) -> Launch:
    from kvcomm.rope.triton_linear import move_linear_kernel

    _, heads, tokens, _ = source.shape
    weights, intercept = offset.weights, offset.intercept
    names = ("w_layer", "w_head", "w_in", "w_out", "i_layer", "i_head", "i_bucket")
    arguments |= {
        "weights": weights,
        "intercept": intercept,
        "buckets": offset.buckets,
        "factor": arguments["cos"] if offset.factor is None else offset.factor,
        "skip": len(source.keys) - len(weights),
        **dict(zip(names, (*weights.stride(), *intercept.stride()[:3]), strict=True)),
    }
    short = source.dtype in (torch.bfloat16, torch.float16)
    wide, partial = int(constants["W"]) > 128, bool(constants["REST"])
    # Larger tiles spill registers, and on AMD smaller ones among as many warps do.
    block = 64 if hip and not wide else max(16, 64 >> (wide + partial + (not short)))
    block = min(block, max(32, padded(tokens)))
    constants |= {"FACTOR": offset.factor is not None, "B": block, "K": 16 if wide else 32}
    # A 16-bit base is exact in tf32, and what rounding W does to the offset stays below the rounding of the result; a
    # float32 base, or one of scaled codes, needs three products. AMD multiplies float32 itself.
    constants["PRECISION"] = "ieee" if hip else "tf32" if short else "tf32x3"
    warps = 4 if hip and block < 64 else 8
    return Launch(move_linear_kernel, (-(-tokens // block), layers, heads), arguments, constants, warps)


def _place(prefix: str, view: KVView, keys: str, values: str) -> dict[str, Tensor | int]:
    layers = _on_device(view.distances(), view.device)
    strides = zip(("block", "head", "token", "dim"), view.strides, strict=True)
    return {
        keys: view.first_keys,
        values: view.first_values,
        f"{prefix}_layers": layers,
        f"{prefix}_table": layers if view.block_table is None else view.block_table,
        f"{prefix}_start": view.start,
        **{f"{prefix}_{name}": stride for name, stride in strides},
    }


def _scales(scales: Scales | None, source: KVView) -> dict[str, Tensor | int]:
    if scales is None:
        return {"key_scale": source.first_keys, "value_scale": source.first_values}  # not read
    return {"key_scale": scales.keys.contiguous(), "value_scale": scales.values.contiguous()}


def _alignment(view: KVView) -> int:
    """What all layers' distances are multiples of, for wide loads: 16 elements or 1."""
    return 1 if any(distance % 16 for distance in view.distances()) else 16
