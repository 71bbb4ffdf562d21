"""Whether a place's contexts have changed since its offsets were learned: the error of estimates against the expected.

A template that was edited, a tool that changed, a topic that shifts: what a context adds is then no longer what was
learned, and the error rises above what it was at this place before. Every call shows it: a dense one by all its tokens,
a reused one by those that were computed again. A running mean of the last few calls stands against one over many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["steady", "aged", "dropped"]
_FAST, _SLOW, _FALLING = 0.5, 0.05, 0.3  # weights of one call; what was ever done well is the measure
_SETTLING = 3  # calls before anything is judged
AGED_ABOVE, DROPPED_ABOVE = 2.0, 5.0
"""Recent over former error, at which what was learned counts half, or no more."""


@dataclass
class Drift:
    """Of one pair of places.

    Attributes:
        calls: how many showed anything.
        recent, former: running means of log(error / expected error).
        aged, dropped: how often what was learned was made to count half, and how often it was let go.
    """

    calls: int = 0
    recent: float = 0.0
    former: float = 0.0
    aged: int = 0
    dropped: int = 0

    @property
    def rise(self) -> float:
        """Recent over former error; 1 while nothing has changed."""
        return math.exp(self.recent - self.former)

    def see(self, ratio: float) -> Verdict:
        """Take in one call's error over the expected, and say what becomes of what was learned."""
        if not ratio > 0 or not math.isfinite(ratio):
            return "steady"
        log = math.log(ratio)
        self.calls += 1
        if self.calls <= _SETTLING:
            self.former += (log - self.former) / self.calls
            self.recent = self.former
            return "steady"
        self.recent += _FAST * (log - self.recent)
        rise = self.rise
        self.former += (_SLOW if log > self.former else _FALLING) * (log - self.former)
        if rise > DROPPED_ABOVE:
            self.dropped += 1
            self.calls, self.recent, self.former = 0, 0.0, 0.0
            return "dropped"
        if rise > AGED_ABOVE:
            self.aged += 1
            self.recent = self.former + math.log(AGED_ABOVE) / 2  # the next step needs a call of its own
            return "aged"
        return "steady"
