"""What does a token cost that is computed again among thousands that are held? Beside a token of a dense prefill.

``python -m benchmarks.bench --only recompute``
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.common import RealText, Size, rounds, timed
from eval.running.setting import Setting
from kvcomm import Engine

RUN = 8
"""Tokens that stand together, as the first ones of a segment do."""


@torch.inference_mode()
def measure(setting: Setting, engine: Engine, size: Size) -> dict[str, Any]:
    """Seconds per token of a pass over runs spread evenly over the prompt, and of the model's own prefill of it."""
    ids = RealText(setting.tokenizer, seed=1).segment(size.segment * size.segments).token_ids
    runs = size.recomputed // RUN
    apart = len(ids) / runs
    positions = [int((n + 1) * apart) - RUN + k for n in range(runs) for k in range(RUN)]
    backend = engine.backend
    buffer = backend.buffer(len(ids))
    backend.forward(buffer, ids, range(len(ids)), logits=0)
    chosen = [ids[p] for p in positions]
    whole = torch.tensor([ids])
    model: Any = setting.model
    calls = {
        "recompute": lambda: timed(lambda: backend.forward(buffer, chosen, positions, logits=1)),
        "dense": lambda: timed(lambda: model(whole, use_cache=True, logits_to_keep=1)),
    }
    calls["recompute"]()
    times = rounds(calls, size.repeats)
    each, dense = median(times["recompute"]) / len(positions), median(times["dense"]) / len(ids)
    return {
        "s_per_token": each,
        "dense_s_per_token": dense,
        "ratio": each / dense,
        "tokens": len(positions),
        "over_tokens": len(ids),
        "runs_of": RUN,
        "n": size.repeats,
    }
