"""The plot of ``eval pareto``: KL against what is recomputed, one line a method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.files.output import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEASURES = {"mean_kl": "mean over the answer", "first_kl": "first token"}
_COLOURS = {"leading": "tab:orange", "deviation": "tab:red", "attended": "tab:purple", "predicted": "tab:blue",
            "product": "tab:green"}  # fmt: skip
_LEAST = 1e-5


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write an SVG: a row for all texts together and one for each kind, mean and first-token KL on log axes."""
    from matplotlib.figure import Figure

    rows = {"all texts": result["points"], **result["by_text"]}
    figure = Figure(figsize=(11, 3.6 * len(rows) + 1), layout="constrained")
    grid = figure.subplots(len(rows), 2, squeeze=False, sharex=True)
    for axes, (text, points) in zip(grid, rows.items(), strict=True):
        for one, (measure, title) in zip(axes, _MEASURES.items(), strict=True):
            _panel(one, points, measure)
            one.axhline(result["yardstick"][measure], color="grey", linewidth=1, label="dense bfloat16 (all texts)")
            one.set(yscale="log", ylabel="KL, nats", title=f"{text}: {title}")
            one.grid(alpha=0.3)
    for one in grid[-1]:
        one.set(xlabel="recomputed, % of the tokens that exact reuse leaves")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside lower center")
    figure.suptitle(f"{result['model']}: closer is lower, cheaper is left; solid is ours, dashed is published")
    write_figure(path, figure)


def _panel(axes: Axes, points: Sequence[Mapping[str, Any]], measure: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        lines[point["method"].split("@")[0]].append((100 * point["recompute"], max(point[measure], _LEAST)))
    for name, places in sorted(lines.items()):
        if name.startswith("ablation"):
            continue
        xs, ys = zip(*sorted(places), strict=True)
        axes.plot(xs, ys, label=name, marker="o", markersize=3, **_look(name))


def _look(name: str) -> dict[str, Any]:
    kind = name.removesuffix("-captured").removeprefix("kvcomm-")
    colour = _COLOURS.get(kind, {"oracle": "black", "rerotate": "tab:brown", "paper": "tab:pink"}.get(kind, "tab:cyan"))
    if name == "oracle":
        return {"color": colour, "linestyle": ":", "linewidth": 1}
    if name.startswith("kvcomm") and name != "kvcomm-paper":
        return {"color": colour, "linestyle": "-", "linewidth": 2}
    return {"color": colour, "linestyle": "--" if name.endswith("-captured") else "-.", "linewidth": 1}
