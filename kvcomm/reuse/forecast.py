"""Both times of a call, predicted before it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """Seconds to the first token.

    Attributes:
        dense_s: if everything but the exact head is computed.
        reuse_s: if what is held is reused.
        trial: reuse it even so, to see what it takes.
    """

    dense_s: float
    reuse_s: float
    trial: bool = False

    @property
    def dense(self) -> bool:
        """Whether it is computed, because that is expected to be faster."""
        return self.dense_s < self.reuse_s and not self.trial

    def __str__(self) -> str:
        chosen = "computed" if self.dense else "reused, to see what it takes" if self.trial else "reused"
        return f"first token expected after {self.dense_s:.3f} s dense, {self.reuse_s:.3f} s reused: {chosen}"
