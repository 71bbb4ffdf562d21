"""What a selection sees and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from kvcomm.anchors.book import OffsetBook
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.plan import Plan


@dataclass(frozen=True)
class Scene:
    """What a selection may look at: everything held is spliced, nothing is computed yet.

    Attributes:
        plan: its parts say what is exact, approximate or new.
        request: the request's buffer; ``buffer`` is the same, once what is on its way to it has come.
        buffer: KV at every position but the new ones, which hold nothing of use; its length is the prompt's. A
            selection may write KV of fresh passes into it.
        book: the learned offsets, for their predicted errors.
    """

    backend: ModelBackend
    plan: Plan
    request: KVBuffer
    book: OffsetBook

    @property
    def buffer(self) -> KVBuffer:
        self.request.settle()
        return self.request

    @cached_property
    def approximate(self) -> tuple[int, ...]:
        """Positions of selectable parts that hold KV, increasing: those among which a selection chooses."""
        new = set(self.new)
        parts = (part for part in self.plan.parts if part.selectable)
        return tuple(p for part in parts for p in range(part.start, part.stop) if p not in new)

    @property
    def closing(self) -> range:
        """Positions of the prompt's last part that has tokens: the request that the answer follows."""
        last = next(part for part in reversed(self.plan.parts) if part.start < part.stop)
        return range(last.start, last.stop)

    @cached_property
    def new(self) -> tuple[int, ...]:
        """Positions that hold nothing yet, increasing: those of new parts, and some of nearly equal ones."""
        return tuple(p for part in self.plan.parts for p in part.absent)


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
