"""Payload encodings. ``raw`` is lossless; ``int8`` and ``fp8`` keep one scale a head and token and are lossy."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvcomm.errors import InvalidInput
from kvcomm.types import ModelFingerprint

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.uint32: "U32",
}  # fmt: skip
_PAD = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a frame: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@lru_cache(maxsize=256)
def safetensors_head(specs: tuple[TensorSpec, ...]) -> bytes:
    """The only head that a frame of these tensors may have: length, JSON, spaces up to a multiple of 64 bytes."""
    described: dict[str, object] = {}
    at = 0
    for spec in specs:
        described[spec.name] = {
            "dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes],
        }  # fmt: skip
        at += spec.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAD)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Encoding:
    """How a layer's keys and values become a frame's tensors, and back.

    Attributes:
        dtype: of the stored elements; None for the fingerprint's own.
        limit: largest magnitude of that dtype; the scale maps a token's largest element of a head to it.
    """

    name: str
    dtype: torch.dtype | None = None
    limit: float = 0.0

    def specs(self, fingerprint: ModelFingerprint, tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors of one layer's frame, largest alignment first as safetensors orders them."""
        shape = (fingerprint.n_kv_heads, tokens, fingerprint.head_dim)
        if self.dtype is None:
            kind = fingerprint.torch_dtype
            if kind not in _NAMES:
                raise InvalidInput(f"KV dtype {kind} cannot be stored; use float32, float16, bfloat16 or float64")
            return TensorSpec("keys", kind, shape), TensorSpec("values", kind, shape)
        scale = (*shape[:2], 1)
        return (
            TensorSpec("keys_scale", torch.float32, scale), TensorSpec("values_scale", torch.float32, scale),
            TensorSpec("keys", self.dtype, shape), TensorSpec("values", self.dtype, shape),
        )  # fmt: skip

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Contiguous host tensors in the order of ``specs``; for ``raw`` no copy where none is needed."""
        keys, values = keys.detach().to("cpu"), values.detach().to("cpu")
        if self.dtype is None:
            return [keys.contiguous(), values.contiguous()]
        scales, codes = [], []
        for part in (keys, values):
            wide = part.to(torch.float32)
            scale = (wide.abs().amax(-1, keepdim=True) / self.limit).clamp_min(torch.finfo(torch.float32).tiny)
            code = wide / scale
            codes.append((code.round() if self.dtype is torch.int8 else code).to(self.dtype).contiguous())
            scales.append(scale.contiguous())
        return [*scales, *codes]

    def decode(self, parts: list[torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the layer that ``parts`` hold into ``keys`` and ``values`` [kv heads, tokens, head dim]."""
        if self.dtype is None:
            keys.copy_(parts[0])
            values.copy_(parts[1])
            return
        keys.copy_(parts[2].to(torch.float32) * parts[0])
        values.copy_(parts[3].to(torch.float32) * parts[1])


ENCODINGS: dict[str, Encoding] = {
    e.name: e
    for e in (Encoding("raw"), Encoding("int8", torch.int8, 127.0), Encoding("fp8", torch.float8_e4m3fn, 448.0))
}


def encoding(name: str) -> Encoding:
    """The encoding of that name. Raises InvalidInput for an unknown one."""
    found = ENCODINGS.get(name)
    if found is None:
        raise InvalidInput(f"encoding {name!r} is unknown; use one of {', '.join(ENCODINGS)}")
    return found
