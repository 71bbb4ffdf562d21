"""What does a learned offset cost in a splice? Beside its floor: the splice alone and the product alone.

``python -m benchmarks.bench --only offset``
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.common import Size, rounds, timed
from benchmarks.splice import random_kv, splice_all
from kvcomm import Engine
from kvcomm.anchors.offset import LinearPredictor
from kvcomm.anchors.statistics import Pair, bucket_count, features

_PAIR = Pair("prompt", "a/slot", "b/slot")


@torch.inference_mode()
def measure(engine: Engine, size: Size) -> dict[str, Any]:
    """Seconds per thousand tokens, the weights as the engine would use them on this machine."""
    spec = engine.backend.spec
    f = spec.fingerprint
    bases = [random_kv(spec, size.segment, seed) for seed in range(size.segments)]
    width, layers = 2 * f.head_dim, f.n_layers - 1
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(layers, f.n_kv_heads, width, width, generator=generator) / width**0.5
    intercept = torch.randn(layers, f.n_kv_heads, bucket_count(size.segment), width, generator=generator)
    predictor = LinearPredictor(weights, intercept, {})
    offset = predictor.map(_PAIR, bases[0], torch.ones(layers, 2))
    buffer = engine.backend.buffer(size.segment * size.segments + 1)
    x = torch.randn(2 * f.n_kv_heads, size.segment, width).to(offset.weights.dtype)  # two layers: stays in the cache
    w, y = offset.weights[:2].flatten(0, 1), torch.empty_like(x)

    def product() -> None:
        for _ in range(size.segments * layers // 2):
            torch.bmm(x, w, out=y)

    calls = {
        "offset": lambda: timed(lambda: splice_all(buffer, spec, bases, offset)),
        "splice": lambda: timed(lambda: splice_all(buffer, spec, bases)),
        "product": lambda: timed(product),
    }
    rounds(calls, 1)
    thousands = size.segment * size.segments / 1000
    found = {name: median(times) / thousands for name, times in rounds(calls, 3 * size.repeats).items()}
    inputs = features(bases[0])[: len(w) // f.n_kv_heads].flatten(0, 1)
    exact = inputs @ weights[:2].flatten(0, 1)
    rounded = (inputs.to(w.dtype) @ w).float()
    return {
        "s_per_1k_tokens": found["offset"],
        "splice_s_per_1k_tokens": found["splice"],
        "product_s_per_1k_tokens": found["product"],
        "ratio": found["offset"] / (found["splice"] + found["product"]),
        "weights": str(w.dtype).removeprefix("torch."),
        "relative_error_of_the_product": float((rounded - exact).norm() / exact.norm()),
        "n": 3 * size.repeats,
    }
