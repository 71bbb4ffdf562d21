"""Twice the reused tokens at equal recompute: does TTFT grow as a dense prefill's last tokens do, or faster?

``python -m benchmarks.bench --only doubling``
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.common import rounds, timed
from benchmarks.team import Team
from eval.running.setting import Setting
from kvcomm import Fast
from kvcomm.hf.support import cache_argument
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import Segment


def measure(setting: Setting, team: Team) -> dict[str, Any]:
    """TTFT with half of the segments and with all, new text behind them; and the dense time of as many last tokens."""
    size = team.size
    session = team.engine.fork(policy=Fast())
    texts = [team.text.segment(size.segment) for _ in range(size.segments)]
    session.isolate(texts)
    measured, new = session.fork(policy=Fast(), learn=False), team.text.segment(size.recomputed)
    label = f"{team.names[-1]}/{team.names[0]}"
    calls: dict[str, Any] = {}
    for name, count in (("half", size.segments // 2), ("whole", size.segments)):
        prompt = Prompt((*(Part(text, label) for text in texts[:count]), Part(new, f"{team.names[-1]}/new")))
        calls[name] = lambda prompt=prompt: _first_token(measured, prompt)
        calls[f"dense {name}"] = _last_tokens(setting, texts[:count], new)
    for call in calls.values():
        call()
    times = {name: median(found) for name, found in rounds(calls, size.repeats).items()}
    ratio, dense = times["whole"] / times["half"], times["dense whole"] / times["dense half"]
    return {
        "reused_tokens": [size.segment * size.segments // 2, size.segment * size.segments],
        "computed_tokens": size.recomputed,
        "ttft_s": [times["half"], times["whole"]],
        "ttft_ratio": ratio,
        "dense_last_tokens_s_per_token": [times[f"dense {n}"] / size.recomputed for n in ("half", "whole")],
        "dense_ratio": dense,
        "ratio_of_ratios": ratio / dense,
        "n": size.repeats,
    }


def _first_token(engine: Any, prompt: Prompt) -> float:
    return float(engine.generate(prompt, max_new_tokens=1, do_sample=False).ttft_s)


def _last_tokens(setting: Setting, texts: list[Segment], new: Segment) -> Any:
    """The model's own forward over the last tokens of a prompt, behind the cache that its own prefill left."""
    model: Any = setting.model
    held = DynamicCache()
    name = cache_argument(setting.model)
    ids = [token for text in texts for token in text.token_ids]
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{name: held})

    def call() -> float:
        held.crop(len(ids))
        with torch.inference_mode():
            given = {"use_cache": True, "logits_to_keep": 1, name: held}
            return timed(lambda: model(torch.tensor([new.token_ids]), **given))

    return call
