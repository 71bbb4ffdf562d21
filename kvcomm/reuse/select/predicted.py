"""The tokens, or the segments, expected to be furthest off; known before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomm.reuse.select.scene import Scene
from kvcomm.reuse.select.score import ByScore, Score, certain


@dataclass(frozen=True)
class PredictedError(ByScore):
    """Takes the tokens with the largest expected squared error of their spliced KV.

    No pass of the model is needed, nor a look at the KV. The expectation is kvcomm.anchors.variance's: by places of
    capture and use and by token index. While nothing was observed, tokens near the start of their segment come first,
    where a base differs most. The closing request, out of which the first token of the answer comes, is always taken.
    """

    def score(self, scene: Scene) -> Score:
        found = _expected(scene)
        return Score(certain(scene, torch.cat(found)) if found else torch.zeros(0))


@dataclass(frozen=True)
class SegmentError(ByScore):
    """Scores every token by the mean expected squared error of its whole segment.

    A segment that is off as a whole, such as another agent's answer, misleads more than one that is off at its first
    tokens alone. Made to be a factor of a Product: by itself it takes segments one after another.
    """

    def score(self, scene: Scene) -> Score:
        found = [expected.mean().expand_as(expected) for expected in _expected(scene)]
        return Score(certain(scene, torch.cat(found)) if found else torch.zeros(0))


def _expected(scene: Scene) -> list[torch.Tensor]:
    """Of each approximate part with tokens to choose among, their expected squared errors, float64."""
    errors = scene.book.errors()
    found = []
    for part in scene.plan.parts:
        held = sorted({*range(part.start, part.stop)} - {*part.absent})
        if not part.selectable or part.base is None or not held:
            continue
        if errors is None:
            expected = 1.0 / torch.arange(1, part.stop - part.start + 1, dtype=torch.float64)
        else:
            expected = errors.expect(part.pair, part.stop - part.start).double()
        found.append(expected[[p - part.start for p in held]])
    return found
