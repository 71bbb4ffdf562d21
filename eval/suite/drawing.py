"""Plots of the page as files of their own, for documents that show images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from eval.pages.svg import WIDTH

_CSS = Path(__file__).parents[1] / "pages" / "page.css"
_GAP = 40
_HEAD = 30


def drawing(plots: Sequence[str]) -> str:
    """Inline drawings (eval/pages/svg.py) beside each other, under their titles: one SVG file in the page's colours."""
    heights = [float(found) for plot in plots for found in re.findall(r'^<svg viewBox="0 0 \d+ (\d+)"', plot)]
    titles = [found for plot in plots for found in re.findall(r"^<svg [^>]*?><title>(.*?)</title>", plot, re.DOTALL)]
    width, height = len(plots) * (WIDTH + _GAP) - _GAP, max(heights) + _HEAD
    placed = [
        f'<text x="{n * (WIDTH + _GAP)}" y="8" class="label">{title}</text>'
        + plot.replace("<svg ", f'<svg x="{n * (WIDTH + _GAP)}" y="{_HEAD}" width="{WIDTH}" height="{own:.0f}" ', 1)
        for n, (plot, own, title) in enumerate(zip(plots, heights, titles, strict=True))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -16 {width + 32} {height + 32:.0f}" '
        f'width="{width + 32}" height="{height + 32:.0f}"><style>{_style()}</style>'
        f'<rect x="-16" y="-16" width="100%" height="100%" style="fill: var(--card)"/>{"".join(placed)}</svg>\n'
    )


def _style() -> str:
    """The page's variables and the rules of its drawings."""
    css = _CSS.read_text(encoding="utf-8")
    variables = css[: css.index("* {")]
    rules = [line for line in css.splitlines() if re.match(r"(text|line|\.[cs]-)", line)]
    return "\n".join([variables.strip(), *rules])
