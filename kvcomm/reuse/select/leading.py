"""The first tokens of each segment (EPIC's LegoLink, arXiv 2410.15332).

They are where a segment computed elsewhere differs most: behind another text, or none, they had attended to other
things.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import InvalidInput
from kvcomm.reuse.select.scene import Scene, Selected
from kvcomm.reuse.select.score import check_share


def leading(scene: Scene, k: int) -> tuple[int, ...]:
    """The first ``k`` positions of each selectable part, or as many as it has."""
    parts = (part for part in scene.plan.parts if part.selectable)
    return tuple(p for part in parts for p in range(part.start, min(part.start + k, part.stop)))


@dataclass(frozen=True)
class Leading:
    """The first k tokens of each segment.

    Raises:
        InvalidInput: k is negative.
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 0:
            raise InvalidInput(f"leading k is {self.k!r}; give a whole number of tokens, 0 or more")

    def choose(self, scene: Scene) -> Selected:
        return Selected(leading(scene, self.k))


@dataclass(frozen=True)
class LeadingShare:
    """The first k tokens of each segment, k being what brings the total nearest to a share of approximate tokens.

    Raises:
        InvalidInput: the share is outside 0 to 1.
    """

    share: float

    def __post_init__(self) -> None:
        check_share(self.share)

    def choose(self, scene: Scene) -> Selected:
        lengths = [part.stop - part.start for part in scene.plan.parts if part.selectable]
        wanted = self.share * sum(lengths)
        ks = range(max(lengths, default=0) + 1)
        return Selected(leading(scene, min(ks, key=lambda k: abs(sum(min(k, n) for n in lengths) - wanted))))
