"""Which tokens of a reused segment to compute again. One frozen dataclass a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcomm.errors import InvalidInput


class Selection(Protocol):
    """Chooses token indices within one approximately reused segment."""

    def indices(self, tokens: int) -> range:
        """Indices to recompute in a segment of ``tokens`` tokens, increasing."""
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

    def indices(self, tokens: int) -> range:
        return range(min(self.k, tokens))
