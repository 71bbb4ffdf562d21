"""How fast does KV move into a request's cache? Destination bytes a second, beside a plain copy of as many bytes.

``python -m benchmarks.bench --only splice``
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.common import Size, rounds, timed
from kvcomm import Engine
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.splice import splice
from kvcomm.rope.view import LinearMap
from kvcomm.types import SegmentKV


def random_kv(spec: ModelSpec, tokens: int, seed: int) -> SegmentKV:
    """KV of the model's shape and dtype."""
    f = spec.fingerprint
    generator = torch.Generator().manual_seed(seed)
    shape = (f.n_layers, f.n_kv_heads, tokens, f.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(f.torch_dtype) for _ in range(2))
    return SegmentKV(keys, values)


def splice_all(
    buffer: KVBuffer, spec: ModelSpec, bases: list[SegmentKV], offset: SegmentKV | LinearMap | None = None
) -> None:
    """Segments one behind the other from position 1."""
    at = 1
    for base in bases:
        splice(buffer, spec, base, at, offset)
        at += len(base)


@torch.inference_mode()
def measure(engine: Engine, size: Size) -> dict[str, Any]:
    """Rates in GB/s: segments re-rotated into place, the same with a given offset added, and the copy."""
    spec = engine.backend.spec
    bases = [random_kv(spec, size.segment, seed) for seed in range(size.segments)]
    added = random_kv(spec, size.segment, size.segments)
    buffer = engine.backend.buffer(size.segment * size.segments + 1)
    nbytes = sum(base.nbytes for base in bases)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    calls = {
        "splice": lambda: timed(lambda: splice_all(buffer, spec, bases)),
        "added": lambda: timed(lambda: splice_all(buffer, spec, bases, added)),
        "memcpy": lambda: timed(lambda: target.copy_(source)),
    }
    rounds(calls, 1)
    rates = {name: nbytes / median(times) / 1e9 for name, times in rounds(calls, 3 * size.repeats).items()}
    return {
        "gb_per_s": rates["splice"],
        "memcpy_gb_per_s": rates["memcpy"],
        "ratio": rates["splice"] / rates["memcpy"],
        "with_given_offset_gb_per_s": rates["added"],
        "bytes": nbytes,
        "n": 3 * size.repeats,
    }
