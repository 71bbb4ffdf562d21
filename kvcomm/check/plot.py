"""Predicted against measured KL, both axes logarithmic: as text for a terminal, as SVG for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]
_LOW, _HIGH = -5, 1  # powers of ten shown
_SIZE, _MARGIN = 420, 50


def rank_correlation(points: Points) -> float:
    """Spearman's, ties sharing their mean rank; NaN for fewer than three points or where one side is all alike."""
    if len(points) < 3:
        return math.nan
    a, b = (_ranks([point[side] for point in points]) for side in (0, 1))
    mean = (len(points) - 1) / 2
    cov = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    var = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return cov / var if var > 0 else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: n for n, value in reversed(list(enumerate(ordered)))}
    last = {value: n for n, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 for value in values]


def _place(value: float) -> float:
    """0 to 1 along an axis."""
    at = (math.log10(max(value, 1e-30)) - _LOW) / (_HIGH - _LOW)
    return min(max(at, 0.0), 1.0)


def as_text(points: Points, width: int = 49, height: int = 17) -> str:
    """A scatter plot of characters; ``.`` is where both are equal."""
    grid = [[" "] * width for _ in range(height)]
    for column in range(width):
        grid[round(column / (width - 1) * (height - 1))][column] = "."
    for predicted, measured in points:
        grid[round(_place(measured) * (height - 1))][round(_place(predicted) * (width - 1))] = "o"
    lines = ["measured KL"]
    for n, row in reversed(list(enumerate(grid))):
        power = _LOW + n / (height - 1) * (_HIGH - _LOW)
        label = f"1e{power:+.0f}" if abs(power - round(power)) < 1e-9 else ""
        lines.append(f"{label:>6} |{''.join(row)}")
    lines += [
        " " * 7 + "+" + "-" * width,
        " " * 8 + f"1e{_LOW:+d}" + "predicted KL".center(width - 8) + f"1e{_HIGH:+d}",
    ]
    return "\n".join(lines)


def as_svg(points: Points, max_kl: float | None = None) -> str:
    """The same as an SVG element."""

    def x(value: float) -> float:
        return _MARGIN + _place(value) * (_SIZE - 2 * _MARGIN)

    def y(value: float) -> float:
        return _SIZE - x(value)

    low, high = 10.0**_LOW, 10.0**_HIGH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE}" height="{_SIZE}" font-family="sans-serif" '
        'font-size="12" role="img"><title>Predicted against measured KL</title>',
        f'<rect x="{x(low)}" y="{y(high)}" width="{x(high) - x(low)}" height="{y(low) - y(high)}" fill="none" '
        'stroke="#888"/>',
        f'<line x1="{x(low)}" y1="{y(low)}" x2="{x(high)}" y2="{y(high)}" stroke="#bbb"/>',
        f'<text x="{_SIZE / 2}" y="{_MARGIN - 18}" text-anchor="middle" font-weight="600">'
        "Predicted against measured KL</text>",
    ]
    if max_kl is not None:
        parts.append(
            f'<line x1="{x(low)}" y1="{y(max_kl):.1f}" x2="{x(high)}" y2="{y(max_kl):.1f}" stroke="#c33" '
            'stroke-dasharray="4 3"/>'
            f'<text x="{x(low) + 6}" y="{y(max_kl) - 5:.1f}" fill="#c33">bound {max_kl:g}</text>'
        )
    for power in range(_LOW, _HIGH + 1):
        at = 10.0**power
        parts.append(f'<text x="{x(at)}" y="{_SIZE - _MARGIN + 16}" text-anchor="middle">1e{power}</text>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y(at) + 4}" text-anchor="end">1e{power}</text>')
    parts += [f'<circle cx="{x(p):.1f}" cy="{y(m):.1f}" r="3" fill="#06c" fill-opacity=".6"/>' for p, m in points]
    parts.append(f'<text x="{_SIZE / 2}" y="{_SIZE - 10}" text-anchor="middle">predicted KL (nats)</text>')
    parts.append(
        f'<text x="15" y="{_SIZE / 2}" text-anchor="middle" transform="rotate(-90 15 {_SIZE / 2})">'
        "measured KL (nats)</text>"
    )
    return "\n".join([*parts, "</svg>"])
