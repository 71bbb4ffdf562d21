"""Which tokens of reused segments to compute again. One frozen dataclass a method; its fields are its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcomm.anchors.book import OffsetBook
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.plan import Plan


@dataclass(frozen=True)
class Scene:
    """What a selection may look at: everything held is spliced, nothing is computed yet.

    Attributes:
        plan: its parts say what is exact, approximate or new.
        buffer: KV at every position but those of new parts, which hold nothing of use. A selection may write true KV
            into it.
        book: the learned offsets, for their predicted errors.
    """

    backend: ModelBackend
    plan: Plan
    buffer: KVBuffer
    book: OffsetBook


@dataclass(frozen=True)
class Selected:
    """A selection's outcome.

    Attributes:
        positions: positions of approximate parts to compute again, increasing.
        extra_tokens: what choosing them cost, in tokens run through all layers; a token run through a part of the
            layers counts by that part.
    """

    positions: tuple[int, ...]
    extra_tokens: float = 0.0


class Selection(Protocol):
    """Chooses what to compute again, once everything held is spliced."""

    def choose(self, scene: Scene) -> Selected:
        """Positions to recompute; any of approximate parts, none of others."""
        ...


@dataclass(frozen=True)
class Leading:
    """The first k tokens of each segment (EPIC's LegoLink-k, arXiv 2410.15332).

    They are where a segment computed elsewhere differs most: behind another text, or none, they had attended to other
    things.

    Raises:
        InvalidInput: k is negative.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidInput(f"leading k is {self.k}; give 0 or more tokens")

    def choose(self, scene: Scene) -> Selected:
        parts = (part for part in scene.plan.parts if part.action == "approximate")
        return Selected(tuple(p for part in parts for p in range(part.start, min(part.start + self.k, part.stop))))
