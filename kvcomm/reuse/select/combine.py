"""Selections made of selections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcomm.errors import InvalidInput
from kvcomm.reuse.select.scene import Scene, Selected, Selection
from kvcomm.reuse.select.score import ByScore, Score


@dataclass(frozen=True)
class Union:
    """Whatever either of two selections chooses; both are paid for."""

    first: Selection
    second: Selection

    def choose(self, scene: Scene) -> Selected:
        a, b = self.first.choose(scene), self.second.choose(scene)
        return Selected(tuple(sorted({*a.positions, *b.positions})), a.extra_tokens + b.extra_tokens)


@dataclass(frozen=True)
class Product(ByScore):
    """Takes the tokens with the highest product of scores: far off and looked at, for example.

    Attributes:
        factors: two or more selections by score; their own shares do not matter.

    Raises:
        InvalidInput: share out of range, or fewer than two factors.
    """

    factors: tuple[ByScore, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.factors) < 2 or not all(isinstance(factor, ByScore) for factor in self.factors):
            raise InvalidInput(f"factors are {self.factors!r}; give two or more selections by score")

    def score(self, scene: Scene) -> Score:
        scores = [factor.score(scene) for factor in self.factors]
        values = torch.stack([score.values.double().cpu() for score in scores]).prod(0)
        return Score(values, sum(score.extra_tokens for score in scores), max(score.partial for score in scores))
