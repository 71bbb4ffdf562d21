"""Methods compared at equal recompute: each method's line through its points, read off at given places."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

PLACES = (0.05, 0.10, 0.15, 0.20, 0.30)
PUBLISHED = ("leading", "deviation", "attended", "leading-captured", "deviation-captured", "attended-captured")
OURS = ("kvcomm-predicted", "kvcomm-product")
MEASURES = ("mean_kl", "first_kl")
_LEAST = 1e-7


def table(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each place and measure the best published method, our best one, and the ratio of the two; and for each of
    ours the ratio to the same without offsets.

    ``None`` where no line reaches the place: nothing is extrapolated.
    """
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        lines[point["method"].split("@")[0]].append(point)
    found = []
    for place in PLACES:
        row: dict[str, Any] = {"recompute": place}
        for measure in MEASURES:
            theirs, ours = (best(lines, names, place, measure) for names in (PUBLISHED, OURS))
            ratio = ours[1] / theirs[1] if theirs and ours else None
            offsets = {name: _against_none(lines, name, place, measure) for name in OURS}
            row[measure] = {"published": theirs, "kvcomm": ours, "ratio": ratio, "offsets": offsets}
        found.append(row)
    return found


def _against_none(lines: dict[str, list[dict[str, Any]]], name: str, place: float, measure: str) -> float | None:
    """A method of ours over the same without offsets: what offsets are worth at equal recompute."""
    ours = read_off(lines.get(name, []), place, measure)
    plain = read_off(lines.get(f"ablation-{name.removeprefix('kvcomm-')}-no-offsets", []), place, measure)
    return ours / plain if ours is not None and plain is not None else None


def best(
    lines: dict[str, list[dict[str, Any]]], names: Sequence[str], place: float, measure: str
) -> tuple[str, float] | None:
    """The method of least ``measure`` at ``place``, with its value."""
    values = {name: read_off(lines.get(name, []), place, measure) for name in names}
    reaching = {name: value for name, value in values.items() if value is not None}
    return min(reaching.items(), key=lambda item: item[1]) if reaching else None


def read_off(points: Sequence[dict[str, Any]], place: float, measure: str) -> float | None:
    """The line at ``place``: straight between neighbours on a logarithmic axis; None outside the points.

    A method may spend less than the place allows: the value of a point to the left that is lower is taken instead.
    """
    ordered = sorted((point["recompute"], max(point[measure], _LEAST)) for point in points)
    reached = [value for at, value in ordered if at <= place]
    if not reached:
        return None
    value = min(reached)
    for (left, low), (right, high) in zip(ordered, ordered[1:], strict=False):
        if left <= place <= right and right > left:
            share = (place - left) / (right - left)
            value = min(value, math.exp(math.log(low) * (1 - share) + math.log(high) * share))
    return value
