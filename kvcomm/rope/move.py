"""Moving a segment's KV in one launch: base + offset into a request's cache, or out of one into the unrotated frame.

These need triton and a GPU (or Triton's interpreter). Elsewhere ``kvcomm.rope.ops`` turns keys by plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcomm.errors import InvalidInput
from kvcomm.rope import ops
from kvcomm.rope.launch import launches
from kvcomm.rope.spec import RopeSpec
from kvcomm.rope.view import FLOATS, AddedOffset, KVView, Layers, LinearMap, Scales


def place(
    base: KVView,
    target: KVView,
    positions: Tensor,
    spec: RopeSpec,
    *,
    offset: AddedOffset | LinearMap | None = None,
    scales: Scales | None = None,
) -> None:
    """Write base + offset into ``target``, keys turned to ``positions``: one pass through memory.

    Args:
        base: KV in the unrotated frame; float32, bfloat16, float16, or int8 codes with ``scales``.
        target: where to write, contiguous or paged, float32, bfloat16 or float16, no memory shared with the inputs.
        positions: [T], int64, on the base's device, each at least 0 and below ``spec.limit``.
        spec: the rotation of each layer.
        offset: what the new context adds, unrotated: as it is, or a linear map of the base.
        scales: for int8 codes only.

    Raises:
        InvalidInput: an argument is not as said above; nothing was written.
    """
    _check(base, target, positions, spec)
    if (base.dtype == torch.int8) != (scales is not None):
        raise InvalidInput(
            f"base is {base.dtype} and scales are {'absent' if scales is None else 'given'}: int8 codes "
            "need scales, other dtypes have none"
        )
    if scales is not None:
        _check_scales(base, scales)
    if isinstance(offset, AddedOffset):
        _check_added(base, target, offset)
    elif offset is not None:
        _check_linear(base, offset)
    for launch in launches(base, target, positions, spec, scales=scales, offset=offset):
        launch.run()


def cut(source: KVView, target: KVView, positions: Tensor, spec: RopeSpec) -> None:
    """Copy KV out of a cache, contiguous or paged, into ``target``, the rotation at ``positions`` taken off the keys.

    Arguments and errors are those of ``place``.
    """
    _check(source, target, positions, spec)
    if source.dtype not in FLOATS:
        raise InvalidInput(f"a cache of {source.dtype} cannot be cut; pass float32, bfloat16 or float16")
    for launch in launches(source, target, positions, spec, inverse=True):
        launch.run()


def turn(
    keys: Tensor,
    positions: Tensor,
    spec: RopeSpec,
    out: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """``kvcomm.rope.reference.turn`` by kernel: same arguments and result, unchecked as there."""
    if out is None:
        out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    added = None if offset is None else AddedOffset(KVView.contiguous(offset.detach()))
    source, target = KVView.contiguous(keys.detach()), KVView.contiguous(out)
    for launch in launches(source, target, positions, spec, inverse=inverse, offset=added):
        launch.run()
    return out


def _check(source: KVView, target: KVView, positions: Tensor, spec: RopeSpec) -> None:
    if source.shape != target.shape or (source.values is None) != (target.values is None):
        raise InvalidInput(
            f"from {list(source.shape)} to {list(target.shape)} [layers, kv heads, T, head_dim]: make them agree, with "
            "values on both sides or on neither"
        )
    if source.device != target.device:
        raise InvalidInput(f"source is on {source.device}, target on {target.device}; move one there first")
    if target.dtype not in FLOATS:
        raise InvalidInput(f"target is {target.dtype}; pass float32, bfloat16 or float16")
    layers, _, tokens, dim = source.shape
    if layers != len(spec.layers) or spec.head_dim not in (None, dim) or dim < 2:
        raise InvalidInput(
            f"KV has {layers} layers of head_dim {dim}, the spec {len(spec.layers)} of {spec.head_dim}; pass all "
            "layers of the model that the spec is of"
        )
    ops.check_positions(tokens, source.device, positions, spec)
    if any(stride == 0 and size > 1 for stride, size in zip(target.strides[1:], _sizes(target), strict=True)):
        raise InvalidInput(f"target has strides {target.strides}, so elements share a place; pass one not expanded")
    _check_apart(source, target, "source")


def _sizes(view: KVView) -> tuple[int, int, int]:
    _, heads, tokens, dim = view.shape
    return heads, tokens, dim


def _check_apart(source: KVView, target: KVView, name: str) -> None:
    """Raise InvalidInput where the two share memory."""
    theirs = [tensor for part in (target.keys, target.values) if part is not None for tensor in _tensors(part)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in theirs}
    for part in (source.keys, source.values):
        for tensor in () if part is None else _tensors(part):
            if tensor.untyped_storage().data_ptr() in storages and any(ops.overlap(tensor, t) for t in theirs):
                raise InvalidInput(
                    f"target shares memory with the {name}; pass another buffer, KV is not turned in place"
                )


def _tensors(layers: Layers) -> list[Tensor]:
    return [layers] if isinstance(layers, Tensor) else list(layers)


def _check_scales(base: KVView, scales: Scales) -> None:
    layers, heads, tokens, dim = base.shape
    for name, scale in (("keys", scales.keys), ("values", scales.values)):
        fits = list(scale.shape) in ([layers, heads, tokens, 1], [layers, heads, 1, dim])
        if not fits or scale.dtype != torch.float32 or scale.device != base.device:
            raise InvalidInput(
                f"scales of {name} are {list(scale.shape)} {scale.dtype} on {scale.device}; pass float32 "
                f"[{layers}, {heads}, {tokens}, 1] or [{layers}, {heads}, 1, {dim}] on {base.device}"
            )


def _check_factor(factor: Tensor | None, layers: int, device: torch.device) -> None:
    if factor is None:
        return
    if list(factor.shape) != [layers, 2] or factor.dtype != torch.float32 or factor.device != device:
        raise InvalidInput(f"factor is {list(factor.shape)} {factor.dtype}; pass float32 [{layers}, 2] on {device}")
    if not factor.is_contiguous():
        raise InvalidInput("factor is not contiguous; pass factor.contiguous()")


def _check_added(base: KVView, target: KVView, offset: AddedOffset) -> None:
    layers, *rest = offset.kv.shape
    fits = 0 < layers <= len(base.keys) and tuple(rest) == base.shape[1:] and offset.kv.dtype in FLOATS
    if not fits or offset.kv.block_table is not None or offset.kv.device != base.device:
        raise InvalidInput(
            f"offset {list(offset.kv.shape)} {offset.kv.dtype} does not go with base {list(base.shape)}; pass "
            "contiguous KV of the base's last layers, in a floating dtype of 16 or 32 bits, on its device"
        )
    if (offset.kv.values is None) != (base.values is None):
        raise InvalidInput("offset and base must both have values, or neither")
    _check_factor(offset.factor, layers, base.device)
    _check_apart(offset.kv, target, "offset")


def _check_linear(base: KVView, offset: LinearMap) -> None:
    _, heads, tokens, dim = base.shape
    weights, mean, buckets = offset.weights, offset.intercept, offset.buckets
    layers = len(weights)
    fits = list(weights.shape) == [layers, heads, 2 * dim, 2 * dim] and weights.dtype in FLOATS
    if not fits or not 0 < layers <= len(base.keys) or base.values is None:
        raise InvalidInput(
            f"weights are {list(weights.shape)} {weights.dtype}; for a base {list(base.shape)} with values pass "
            f"[up to {len(base.keys)}, {heads}, {2 * dim}, {2 * dim}], floating"
        )
    known = mean.shape[2] if mean.dim() == 4 else 0
    fits = list(mean.shape) == [layers, heads, known, 2 * dim] and mean.stride(-1) == 1 and known > 0
    if not fits or mean.dtype != torch.float32:
        raise InvalidInput(
            f"intercept is {list(mean.shape)} {mean.dtype}; pass float32 [{layers}, {heads}, buckets, "
            f"{2 * dim}], the last dimension contiguous"
        )
    if list(buckets.shape) != [tokens] or buckets.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"buckets are {list(buckets.shape)} {buckets.dtype}; pass int64 [{tokens}], one a token")
    if {weights.device, mean.device, buckets.device} != {base.device}:
        raise InvalidInput(f"weights, intercept and buckets must be on {base.device}, where the base is")
    if not buckets.is_contiguous():
        raise InvalidInput("buckets are not contiguous; pass buckets.contiguous()")
    if tokens:
        low, high = (int(bound) for bound in buckets.aminmax())
        if low < 0 or high >= known:
            raise InvalidInput(f"buckets are {low} to {high}, the intercept has {known}; clamp them")
    _check_factor(offset.factor, layers, base.device)
