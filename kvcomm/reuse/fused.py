"""Splice and cut on a GPU: all layers and heads, keys and values of a segment in one launch of a kernel.

The kernels are compared with plain torch on a device before their first use there, at the model's own shape; that
also compiles them, so an Engine does it when it is built. Where they differ, fail or are not installed, plain torch
does the work and a warning says so.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import OrderedDict

import torch

from kvcomm.reuse.backend import ModelSpec
from kvcomm.rope import move, reference
from kvcomm.rope.view import AddedOffset, KVView, LinearMap
from kvcomm.types import SegmentKV

log = logging.getLogger(__name__)
_SPECS_KEPT = 64
_PROBE_TOKENS = (24, 65)  # one tile of the product with W is 32 tokens or more: both of its sizes are compiled
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # of the largest; two or more roundings
_usable: OrderedDict[tuple[str, torch.device], bool] = OrderedDict()


def handles(spec: ModelSpec, device: torch.device) -> bool:
    """Whether kernels move KV of this model on ``device``. The first question about a GPU runs and compares them."""
    if device.type != "cuda":
        return False
    key = (spec.fingerprint.digest, device)
    if key not in _usable:
        _usable[key] = _prove(spec, device)
        if len(_usable) > _SPECS_KEPT:
            _usable.popitem(last=False)
    return _usable[key]


def place(
    base: SegmentKV,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    spec: ModelSpec,
    offset: SegmentKV | LinearMap | None,
) -> None:
    """Write base + offset, keys turned to ``positions``: ``kvcomm.rope.move.place``, whose errors it raises.

    Args:
        keys, values: where to write, [n_layers, n_kv_heads, T, head_dim], any strides.
        positions: int64 [T].
    """
    added = AddedOffset(KVView.contiguous(offset.keys, offset.values)) if isinstance(offset, SegmentKV) else offset
    source, target = KVView.contiguous(base.keys, base.values), KVView.contiguous(keys, values)
    move.place(source, target, positions, spec.rope, offset=added)


def cut(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, spec: ModelSpec) -> SegmentKV:
    """Keys and values [n_layers, n_kv_heads, T, head_dim] copied into new memory, the rotation taken off the keys."""
    out = SegmentKV(*(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (keys, values)))
    move.cut(KVView.contiguous(keys, values), KVView.contiguous(out.keys, out.values), positions, spec.rope)
    return out


def _prove(spec: ModelSpec, device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        log.warning("triton is not installed, so plain torch moves KV on %s; install kvcomm[gpu]", device)
        return False
    try:
        error = max(_error(spec, device, tokens) for tokens in _PROBE_TOKENS)
    except Exception as failure:
        log.warning("kernels fail on %s, so plain torch moves KV there: %s", device, failure, exc_info=failure)
        return False
    limit = _NEAR[spec.fingerprint.torch_dtype]
    if not error <= limit:
        log.warning(
            "kernels on %s differ from plain torch by %.1e of the largest number (limit %.1e), so plain torch moves KV "
            "there; please report it",
            device,
            error,
            limit,
        )
        return False
    return True


@torch.inference_mode()
def _error(spec: ModelSpec, device: torch.device, tokens: int) -> float:
    """Largest difference of place (alone, with an offset, with a linear map) and cut from plain torch, relative."""
    f = spec.fingerprint
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    kv = random(4, f.n_layers, f.n_kv_heads, tokens, f.head_dim).to(f.torch_dtype)
    base, added = SegmentKV(kv[0], kv[1]), SegmentKV(kv[2], kv[3])
    positions = torch.arange(tokens, device=device)
    offsets: list[SegmentKV | LinearMap | None] = [None, added]
    if f.n_layers > 1:
        width = 2 * f.head_dim
        weights = random(f.n_layers - 1, f.n_kv_heads, width, width) / width**0.5
        mean, scale = random(f.n_layers - 1, f.n_kv_heads, 3, width), torch.ones(f.n_layers - 1, 2, device=device)
        offsets.append(LinearMap(weights.mT.contiguous().mT, mean, positions.clamp_max(2), scale))
    errors = []
    for offset in offsets:
        whole = torch.full((2, *kv.shape[1:3], tokens + 3, f.head_dim), torch.nan, dtype=f.torch_dtype, device=device)
        at = whole[:, :, :, 1 : tokens + 1]
        place(base, at[0], at[1], positions, spec, offset)
        extra = torch.zeros(2, *base.keys.shape, device=device)
        if isinstance(offset, SegmentKV):
            extra = kv[2:].float()
        elif offset is not None:
            x = torch.cat([base.keys[1:], base.values[1:]], dim=-1).double()
            y = x @ offset.weights.double() + offset.intercept[:, :, offset.buckets].double()
            extra[:, 1:] = torch.stack(y.float().chunk(2, dim=-1))
        want_keys = reference.turn(base.keys.float() + extra[0], positions, spec.rope)
        errors += [_relative(at[0], want_keys), _relative(at[1], base.values.float() + extra[1])]
        back = cut(at[0], at[1], positions, spec)
        want_keys = reference.turn(at[0].float(), positions, spec.rope, inverse=True)
        errors += [_relative(back.keys, want_keys), _relative(back.values, at[1].float())]
    return max(errors, key=lambda error: (error != error, error))  # NaN, something left unwritten, is the worst


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).abs().max() / wanted.abs().max())
