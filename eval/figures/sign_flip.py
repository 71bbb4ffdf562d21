"""Paired sign-flip test: could differences of this mean have come about had nothing changed?

Had nothing changed, each prompt's difference could as well have been its opposite, so all patterns of signs are equally
likely (R. A. Fisher, The Design of Experiments, 1935, section 21). No shape of the values is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENUMERATED = 20
"""Differences up to which all patterns of signs are gone through, half a million for 20."""
DRAWS = 100_000
"""Patterns drawn for more differences: p is then at least 1e-5, below 0.05 / 5,000."""
_BATCH = 10_000


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p of the mean difference: the share of sign patterns whose mean is at least as far from 0.

    Exact up to ENUMERATED differences other than 0 (one that is 0 has no sign to flip). Beyond, patterns are drawn with
    a fixed seed and the one that was seen counts as one of them, so that p is never too small (B. Phipson, G. K. Smyth,
    "Permutation P-values should never be zero", Stat. Appl. Genet. Mol. Biol. 9(1), 2010).
    """
    moved = np.asarray([d for d in differences if d != 0], dtype=np.float64)
    if len(moved) == 0:
        return 1.0
    seen = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()  # sums of the same values in another order are equal
    if len(moved) <= ENUMERATED:
        return float(np.mean(np.abs(_sums(moved)) >= seen))
    rng = np.random.default_rng(0)
    further = 0
    for _ in range(DRAWS // _BATCH):
        bits = np.unpackbits(rng.integers(256, size=(_BATCH, math.ceil(len(moved) / 8)), dtype=np.uint8), axis=1)
        sums = (2.0 * bits[:, : len(moved)] - 1.0) @ moved
        further += int((np.abs(sums) >= seen).sum())
    return (further + 1) / (DRAWS + 1)


def _sums(moved: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums under all patterns of signs whose first is +: the others are their opposites."""
    found = moved[:1]
    for value in moved[1:]:
        found = np.concatenate([found + value, found - value])
    return found


def needed(level: float) -> int:
    """The fewest differences from which p can reach ``level``: all moving one way have p = 2 / 2^n."""
    return math.ceil(1 - math.log2(level))
