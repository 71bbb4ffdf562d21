"""Three small plots as inline SVG: grouped bars, stacked bars, dots on a log axis.

Colours are CSS classes of the page (``c-…``), so that one drawing serves light and dark. Each takes the width of its
column; text is sized for a drawing shown 300 to 560 pixels wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 460
_LABEL_H = 20


@dataclass(frozen=True)
class Bar:
    """A bar, or a part of one: its class (colour), its length in the plot's unit, and words for it."""

    css: str
    value: float
    text: str


def svg(height: float, title: str, body: Sequence[str]) -> str:
    """A drawing as wide as WIDTH out of SVG elements; ``title`` is read out in its place."""
    drawn = "".join(body)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{drawn}</svg>"
    )


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _rect(x: float, y: float, width: float, height: float, css: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{css}">'
        f"<title>{escape(title)}</title></rect>"
    )


def grouped_bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Horizontal bars under each group's label, each with its text at its end."""
    top = max((bar.value for _, bars in groups for bar in bars), default=0.0) or 1.0
    room, bar_h = WIDTH - 130, 15
    body, y = [], 0.0
    for label, bars in groups:
        body.append(text(0, y + 14, label, "label"))
        y += _LABEL_H
        for bar in bars:
            length = max(room * bar.value / top, 1.5)
            body.append(_rect(0, y, length, bar_h - 2, bar.css, f"{label}: {bar.text}"))
            body.append(text(length + 6, y + bar_h - 4, bar.text, "value"))
            y += bar_h
        y += 12
    return svg(y, title, body)


def stacked_bars(title: str, rows: Sequence[tuple[str, Sequence[Bar], str]]) -> str:
    """One bar a row, made of parts, over a common scale; ``(label, parts, note)`` with the note at the right."""
    top = max((sum(part.value for part in parts) for _, parts, _ in rows), default=0.0) or 1.0
    body, y, bar_h = [], 0.0, 28
    for label, parts, note in rows:
        body.append(text(0, y + 14, label, "label"))
        body.append(text(WIDTH, y + 14, note, "value", "end"))
        y += _LABEL_H
        x = 0.0
        for part in parts:
            length = WIDTH * part.value / top
            body.append(_rect(x, y, length, bar_h, part.css, f"{label}: {part.text}"))
            if length > 8.0 * len(f"{part.value:.0f}") + 8:
                body.append(text(x + length / 2, y + 18.5, f"{part.value:.0f}", "inside", "middle"))
            x += length
        y += bar_h + 12
    return svg(y, title, body)


LEAST = 1e-7  # nats; below it is the rounding of float32


def log_dots(title: str, rows: Sequence[tuple[str, float, str]], reference: tuple[str, float] | None) -> str:
    """A dot a row on a log axis, ``(label, value, note)``; the reference is a line. A hollow dot is below ``LEAST``."""
    values = [value for _, value, _ in rows if value > LEAST] + ([reference[1]] if reference else [])
    low = math.floor(math.log10(min(values)) - 0.15) if values else -4
    high = max(math.ceil(math.log10(max(values))) if values else 0, low + 1)
    left, right = 14.0, WIDTH - 14.0
    top = 22.0 if reference else 4.0
    bottom = top + 40 * len(rows) + 2

    def place(value: float) -> float:
        return left + (right - left) * (math.log10(value) - low) / (high - low)

    body = []
    for power in range(low, high + 1):
        x = place(10.0**power)
        body.append(f'<line x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{bottom:.0f}" class="grid"/>')
        name = f"{10.0**power:g}" if power >= -4 else f"1e{power}"
        anchor = "start" if power == low else "end" if power == high else "middle"
        body.append(text(x + {"start": -10, "end": 10, "middle": 0}[anchor], bottom + 16, name, "axis", anchor))
    if reference:
        x = place(reference[1])
        body.append(f'<line x1="{x:.1f}" y1="{top - 2:.0f}" x2="{x:.1f}" y2="{bottom:.0f}" class="mark"/>')
        anchor = "start" if x < WIDTH / 2 else "end"
        body.append(text(x + (-2 if anchor == "start" else 2), top - 8, reference[0], "value", anchor))
    for number, (label, value, note) in enumerate(rows):
        y = top + 40 * number
        x = place(value) if value > LEAST else left
        body.append(text(0, y + 14, label, "label halo"))
        body.append(text(WIDTH, y + 14, note, "value halo", "end"))
        body.append(f'<line x1="{left:.1f}" y1="{y + 27:.1f}" x2="{x:.1f}" y2="{y + 27:.1f}" class="stem"/>')
        filled = "c-reused" if value > LEAST else "c-hollow s-reused"
        body.append(
            f'<circle cx="{x:.1f}" cy="{y + 27:.1f}" r="6" class="{filled}"><title>{escape(f"{label}: {note}")}</title>'
            "</circle>"
        )
    return svg(bottom + 24, title, body)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML: coloured squares with their meaning, ``(css class, words)``."""
    items = "".join(f'<li><span class="swatch {css}"></span>{escape(words)}</li>' for css, words in entries)
    return f'<ul class="legend">{items}</ul>'
