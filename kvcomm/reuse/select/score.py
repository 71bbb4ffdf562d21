"""Selections that give every approximate token a score and take the highest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcomm.errors import InvalidInput
from kvcomm.reuse.select.scene import Scene, Selected


@dataclass(frozen=True)
class Score:
    """How much each approximate token needs to be computed again.

    Attributes:
        values: one a position of ``scene.approximate``, 0 or more; higher needs it more.
        extra_tokens: tokens that scoring ran through all layers.
        partial: the part of the layers (0 to 1) whose KV scoring computed for every approximate token. A token that is
            then chosen counts as recomputed and not by its part again: published methods carry its first layers on.
    """

    values: torch.Tensor
    extra_tokens: float = 0.0
    partial: float = 0.0


CERTAIN = 1e12
"""A score above all others: of tokens that a method takes in any case."""


def certain(scene: Scene, values: torch.Tensor) -> torch.Tensor:
    """``values``, one a position of ``scene.approximate``, those of the closing request raised above all others."""
    raised = values.clone()
    raised[[n for n, p in enumerate(scene.approximate) if p in scene.closing]] = CERTAIN
    return raised


def check_share(share: float) -> None:
    """Raise InvalidInput unless 0 <= share <= 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise InvalidInput(f"share is {share}; give a fraction of the approximate tokens, 0 to 1")


def take(scene: Scene, score: Score, share: float) -> Selected:
    """The highest-scored tokens, a share of all approximate ones rounded to the nearest count; ties go to the earlier.

    Raises:
        InvalidInput: there is not one score a token, or a score is NaN.
    """
    values = score.values.detach().double().cpu()
    if values.shape != (len(scene.approximate),) or bool(values.isnan().any()):
        raise InvalidInput(
            f"scores of shape {tuple(values.shape)} for {len(scene.approximate)} approximate tokens: give one each, "
            "and no NaN"
        )
    count = math.floor(share * len(scene.approximate) + 0.5)
    order = torch.sort(values, descending=True, stable=True).indices[:count].tolist()
    extra = score.extra_tokens + score.partial * (len(scene.approximate) - count)
    return Selected(tuple(sorted(scene.approximate[n] for n in order)), extra)


@dataclass(frozen=True)
class ByScore:
    """Takes a share of the approximate tokens of the prompt, those with the highest score.

    Attributes:
        share: fraction of the approximate tokens of the whole prompt, 0 to 1.

    Raises:
        InvalidInput: the share is outside 0 to 1.
    """

    share: float = 0.15

    def __post_init__(self) -> None:
        check_share(self.share)

    def score(self, scene: Scene) -> Score:
        """Scores of all approximate tokens; the one function that a method overrides."""
        raise NotImplementedError(f"{type(self).__name__} must override score")

    def choose(self, scene: Scene) -> Selected:
        return take(scene, self.score(scene), self.share)


@dataclass(frozen=True)
class PerSegment:
    """As many tokens as the first ``k`` of each segment would be, but those with the prompt's highest scores.

    The cost grows with the number of segments and not with their length.

    Attributes:
        k: tokens for each approximate segment, on average.
        by: a selection by score; its own share does not matter.

    Raises:
        InvalidInput: k is negative.
    """

    k: int
    by: ByScore

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise InvalidInput(f"k is {self.k!r}; give a whole number of tokens a segment, 0 or more")
        if not isinstance(self.by, ByScore):
            raise InvalidInput(f"by is {self.by!r}; give a selection by score, such as PredictedError()")

    def choose(self, scene: Scene) -> Selected:
        wanted = sum(min(self.k, part.stop - part.start) for part in scene.plan.parts if part.selectable)
        held = len(scene.approximate)
        return take(scene, self.by.score(scene), min(1.0, wanted / held) if held else 0.0)
