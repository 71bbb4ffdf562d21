"""The plot of ``eval pareto``: mean KL against what is recomputed, one line a method."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

_OURS, _PUBLISHED = "-", "--"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write an SVG: mean KL and first-token KL (log axes) against recompute, the bfloat16 yardstick as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, column, title in zip(
        figure.subplots(1, 2), ("mean_kl", "first_kl"), ("whole answer", "first token"), strict=True
    ):
        lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for point in result["points"]:
            lines[point["method"].split("@")[0]].append((100 * point["recompute"], max(point[column], 1e-6)))
        for name, places in sorted(lines.items()):
            xs, ys = zip(*sorted(places), strict=True)
            style = _OURS if name.startswith(("kvcomm", "oracle")) and name != "kvcomm-paper" else _PUBLISHED
            axes.plot(xs, ys, style, marker="o", markersize=4, label=name)
        axes.axhline(result["yardstick"][column], color="grey", linewidth=1, label="dense bfloat16")
        axes.set(yscale="log", xlabel="recomputed, % of tokens that exact reuse leaves", ylabel=f"KL, nats: {title}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.suptitle(f"{result['model']}: closer is lower, cheaper is left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
