"""A selection that knows the answer: what choosing tokens could give at best. For plots; it runs a dense prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.select import ByScore, Scene, Score


@dataclass(frozen=True)
class TrueDeviation(ByScore):
    """Takes the tokens whose spliced KV are furthest from the dense run's, over all layers.

    The score is the squared distance of keys and of values, each in units of its layer's mean square, summed. The dense
    prefill is not counted: neither its tokens nor its time say anything of a method.
    """

    def score(self, scene: Scene) -> Score:
        ids = scene.plan.prompt.token_ids
        dense = KVBuffer(scene.backend.spec, len(ids))
        scene.backend.forward(dense, ids, range(len(ids)), 0)
        at = list(scene.approximate)
        total = torch.zeros(len(at))
        for layer in range(dense.keys.shape[0]):
            for whole, spliced in ((dense.keys, scene.buffer.keys), (dense.values, scene.buffer.values)):
                true, held = whole[layer], spliced[layer]
                away = (held[:, at].float() - true[:, at].float()).square().sum((0, 2))
                total += (away / true[:, at].float().square().mean().clamp_min(1e-30)).cpu()
        return Score(total)
