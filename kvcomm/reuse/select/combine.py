"""Selections made of selections."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Takes the tokens with the highest product of two scores: far off and looked at, for example.

    Attributes:
        factors: two selections by score; their own shares do not matter.

    Raises:
        InvalidInput: share out of range, or not two factors.
    """

    factors: tuple[ByScore, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.factors) != 2:
            raise InvalidInput(f"a product has {len(self.factors)} factors; give two selections by score")

    def score(self, scene: Scene) -> Score:
        a, b = (factor.score(scene) for factor in self.factors)
        partial = max(a.partial, b.partial)
        return Score(a.values.double().cpu() * b.values.double().cpu(), a.extra_tokens + b.extra_tokens, partial)
