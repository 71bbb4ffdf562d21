"""Dots with their intervals, a method a row: inline SVG in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from eval.pages.svg import WIDTH, line, svg, text

_ROW, _LEFT, _RIGHT = 38.0, 12.0, WIDTH - 12.0
LEAST = 1e-6
"""On a logarithmic axis what is smaller stands at the left edge, hollow."""


@dataclass(frozen=True)
class Dot:
    """A method's figure. ``css`` is the colour's class."""

    label: str
    value: float
    low: float
    high: float
    note: str
    css: str


def intervals(title: str, dots: Sequence[Dot], log: bool = False, mark: tuple[str, float] | None = None) -> str:
    """A row for each dot over a common axis, linear from 0 or logarithmic; ``mark`` is a line to compare with."""
    shown = [v for dot in dots for v in (dot.low, dot.value, dot.high)] + ([mark[1]] if mark else [])
    place, ticks = (_log if log else _linear)(shown)
    top = 24.0 if mark else 6.0
    bottom = top + _ROW * len(dots) + 2
    body = []
    for value, name in ticks:
        body.append(line(place(value), top, place(value), bottom, "grid"))
        anchor = "start" if place(value) < 30 else "end" if place(value) > WIDTH - 30 else "middle"
        edge = {"start": _LEFT - 12, "end": _RIGHT + 12, "middle": place(value)}[anchor]
        body.append(text(edge, bottom + 17, name, "axis", anchor))
    if mark:
        x = place(mark[1])
        for number in range(len(dots)):  # beside the dots alone: names stand between
            y = top + _ROW * number + 26
            body.append(line(x, y - 8, x, y + 8, "mark"))
        body.append(line(x, top - 2, x, top + 4, "mark"))
        anchor = "start" if x < WIDTH / 2 else "end"
        body.append(text(x, top - 8, mark[0], "value", anchor))
    for number, dot in enumerate(dots):
        y = top + _ROW * number
        body += [text(0, y + 14, dot.label, "label halo"), text(WIDTH, y + 14, dot.note, "value halo", "end")]
        body.append(line(place(dot.low), y + 26, place(dot.high), y + 26, f"interval s-{dot.css}"))
        css = f"c-hollow s-{dot.css}" if log and dot.value < LEAST else f"c-{dot.css}"
        body.append(
            f'<circle cx="{place(dot.value):.1f}" cy="{y + 26:.1f}" r="5.5" class="{css}"><title>'
            f"{escape(dot.label)}: {escape(dot.note)}</title></circle>"
        )
    return svg(bottom + 24, title, body)


def _linear(values: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    highest = max([*values, 0.0]) or 1.0
    step = 10.0 ** math.floor(math.log10(highest))
    step = next(step * part for part in (0.2, 0.5, 1.0, 2.0) if highest / (step * part) <= 6)
    top = step * math.ceil(highest / step - 1e-9)
    ticks = [(step * n, f"{step * n:g}") for n in range(round(top / step) + 1)]
    return lambda value: _LEFT + (_RIGHT - _LEFT) * max(value, 0.0) / top, ticks


def _log(values: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    seen = [value for value in values if value >= LEAST] or [LEAST, 1.0]
    low, high = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
    high = max(high, low + 1)

    def place(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    return place, [(10.0**n, f"{10.0**n:g}" if n >= -3 else f"1e{n}") for n in range(low, high + 1)]
