"""Rotation of keys as callers use it: inputs are checked, then the implementation for the device does the work.

Keys have shape [layers, kv heads, tokens, head_dim]; positions [tokens] count tokens from 0.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kvcomm.errors import InvalidInput
from kvcomm.rope import reference
from kvcomm.rope.spec import RopeSpec

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Turn(Protocol):
    """An implementation: ``R(positions) (keys + offset)``, or the opposite rotation; see ``reference.turn``."""

    def __call__(
        self,
        keys: Tensor,
        positions: Tensor,
        spec: RopeSpec,
        out: Tensor | None = None,
        *,
        offset: Tensor | None = None,
        inverse: bool = False,
    ) -> Tensor: ...


def _by_kernel(
    keys: Tensor,
    positions: Tensor,
    spec: RopeSpec,
    out: Tensor | None = None,
    *,
    offset: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """Triton is loaded here, at the first use of a GPU, and plain torch does the work where it is not installed."""
    return _kernel()(keys, positions, spec, out, offset=offset, inverse=inverse)


@cache
def _kernel() -> Turn:
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "triton is not installed, so plain torch turns keys on the GPU; install kvcomm[gpu]", stacklevel=2
        )
        return reference.turn
    from kvcomm.rope import move

    return move.turn


IMPLEMENTATIONS: dict[str, Turn] = {"cpu": reference.turn, "cuda": _by_kernel}
"""By device type; a device that is not named here uses the reference."""


def rotate(keys: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None = None) -> Tensor:
    """Turn keys from the unrotated frame to ``positions``: ``a * k`` becomes ``a * R(p) * k``.

    Args:
        keys: [layers, kv heads, T, head_dim], float32, bfloat16 or float16; not changed.
        positions: [T], int64, on the keys' device, each at least 0 and below ``spec.limit``; any order, gaps allowed.
        spec: the rotation of each layer.
        out: where to write: shape, dtype and device of ``keys``, any strides (a slice of a cache, for example), no
            memory shared with ``keys``. None makes a new tensor.

    Returns:
        ``out`` or the new tensor. Arithmetic is float32 with one rounding at the end. Layers without rope and
        dimensions past ``rotary_dim`` are copied.

    Raises:
        InvalidInput: an argument is not as said above; nothing was written.
    """
    return _run(keys, positions, spec, out, None, inverse=False)


def unrotate(keys: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None = None) -> Tensor:
    """Take the rotation at ``positions`` off a model's own keys: ``a * R(p) * k`` becomes ``a * k``.

    Arguments, result and errors are those of ``rotate``.
    """
    return _run(keys, positions, spec, out, None, inverse=True)


def rotate_add(base: Tensor, offset: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None = None) -> Tensor:
    """``rotate(base + offset)`` in one pass through memory, the sum not rounded on the way.

    Args:
        base: as ``keys`` of ``rotate``.
        offset: shape and device of ``base``, float32, bfloat16 or float16; not changed.
        positions, spec, out: as for ``rotate``; ``out`` shares no memory with ``offset`` either.

    Raises:
        InvalidInput: an argument is not as said above; nothing was written.
    """
    return _run(base, positions, spec, out, offset, inverse=False)


def _run(
    keys: Tensor, positions: Tensor, spec: RopeSpec, out: Tensor | None, offset: Tensor | None, *, inverse: bool
) -> Tensor:
    _check_keys(keys, spec)
    check_positions(keys.shape[2], keys.device, positions, spec)
    if offset is not None:
        if offset.shape != keys.shape or offset.device != keys.device or offset.dtype not in _DTYPES:
            raise InvalidInput(
                f"offset {_describe(offset)} does not go with base {_describe(keys)}; give it the same shape and "
                "device, in a floating dtype of 16 or 32 bits"
            )
    if out is not None:
        _check_out(keys, out)
        for name, source in (("keys", keys), ("offset", offset)):
            if source is not None and overlap(source, out):
                raise InvalidInput(f"out shares memory with {name}; pass another buffer, keys are not turned in place")
    return IMPLEMENTATIONS.get(keys.device.type, reference.turn)(
        keys, positions, spec, out, offset=offset, inverse=inverse
    )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _check_keys(keys: Tensor, spec: RopeSpec) -> None:
    if keys.dim() != 4:
        raise InvalidInput(f"keys have shape {list(keys.shape)}; pass [layers, kv heads, tokens, head_dim]")
    if keys.dtype not in _DTYPES:
        raise InvalidInput(f"keys are {keys.dtype}; pass float32, bfloat16 or float16, the model's own dtype")
    if keys.shape[0] != len(spec.layers):
        raise InvalidInput(f"keys have {keys.shape[0]} layers, the spec {len(spec.layers)}; pass all of them")
    if spec.head_dim is not None and keys.shape[3] != spec.head_dim:
        raise InvalidInput(f"keys have head_dim {keys.shape[3]}, the spec {spec.head_dim}; pass keys of the same model")


def check_positions(tokens: int, device: torch.device, positions: Tensor, spec: RopeSpec) -> None:
    """Raise InvalidInput unless ``positions`` are int64 [tokens] on ``device``, from 0 and below ``spec.limit``."""
    if positions.dtype != torch.int64 or list(positions.shape) != [tokens]:
        raise InvalidInput(
            f"positions are {list(positions.shape)} {positions.dtype}; pass [{tokens}] torch.int64, one a token"
        )
    if positions.device != device:
        raise InvalidInput(f"positions are on {positions.device}, keys on {device}; move the positions there")
    if not positions.numel():
        return
    lowest, highest = (int(bound) for bound in positions.aminmax())
    if lowest < 0:
        raise InvalidInput(f"position {lowest} is below 0; positions count tokens from the start of the prompt")
    if highest >= spec.limit:
        remedy = "recompute a sequence that long" if spec.factor_set == "short" else "shorten the prompt"
        raise InvalidInput(f"position {highest} is not below this rope's limit {spec.limit}; {remedy}")


def _check_out(keys: Tensor, out: Tensor) -> None:
    if out.shape != keys.shape or out.dtype != keys.dtype or out.device != keys.device:
        raise InvalidInput(f"out is {_describe(out)}, keys are {_describe(keys)}; make them agree")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise InvalidInput(f"out has strides {list(out.stride())}, so elements share a place; pass one not expanded")


def overlap(left: Tensor, right: Tensor) -> bool:
    """Whether the spans of memory from first to last element meet."""
    if not left.numel() or not right.numel() or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    spans = []
    for tensor in (left, right):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        spans.append((start, start + (reach + 1) * tensor.itemsize))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
