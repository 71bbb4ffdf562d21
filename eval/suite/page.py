"""The suite's page: one self-contained file made from the results file and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.page import facts as facts_section
from eval.page import figures, page, sortable, tiles
from eval.suite.plots import Dot, intervals
from eval.suite.words import columns_of, facts_of, figure, interval, sizes
from eval.words import nats, percent, times

OURS = "kvcomm"
_COLOURS = {"dense": "dense", "exact": "exact", "oracle": "recomputed"}
_LEAD = (
    "Time to first token, reuse and closeness to a full prefill. Intervals are 95 % intervals over prompts; "
    "n is the number of prompts. Closeness is taken along the dense run's own greedy answers; all costs are in TTFT."
)


def suite_page(result: Mapping[str, Any]) -> str:
    """The page of a results file."""
    sections = []
    if result["pooled"]:
        sections += [tiles(_tiles(result["pooled"])), _plots(result, result["pooled"], "all fully connected cells")]
        if sum(cell["topology"] == "full" for cell in result["cells"]) > 1:
            sections.append(_table("All fully connected cells together", result["pooled"], ""))
    if result["failed"]:
        rows = [[(entry["cell"], ""), (entry["error"], "")] for entry in result["failed"]]
        sections.append(sortable("Not measured", ("cell", "why"), rows))
    for cell in result["cells"]:
        sections.append(_table(cell["name"], cell["methods"], sizes(cell)))
        if cell["topology"] != "full":
            sections.append(_plots(result, cell["methods"], cell["name"]))
    sections.append(_methods(result))
    sections.append(facts_section("To repeat it", facts_of(result), result["command"]))
    return page(f"kvcomm evaluation: {result['preset']}", _LEAD, sections, sorts=True)


def _tiles(methods: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    ours = methods.get(OURS)
    if ours is None:
        return []
    shown = []
    if "speedup" in ours:
        shown.append((times(ours["speedup"]["value"]), "sooner to the first token", interval(ours["speedup"], times)))
    shown += [
        (percent(ours["flops_saved"]["value"]), "of prefill FLOPs saved", interval(ours["flops_saved"], percent)),
        (nats(ours["mean_kl"]["value"]), "mean KL, nats", interval(ours["mean_kl"], nats)),
        (percent(ours["top1"]["value"]), "top-1 agreement", interval(ours["top1"], percent)),
    ]
    return shown


def _plots(result: Mapping[str, Any], methods: Mapping[str, Any], of: str) -> str:
    cells = [cell for cell in result["cells"] if of in (cell["name"], "all fully connected cells")]
    speed, distance = speed_and_distance(methods, cells, of)
    shown = [
        (f"Speed-up, {of}", speed, "Dense TTFT over the method's, medians over prompts; right is sooner."),
        (
            f"Distance, {of}",
            distance,
            "Mean KL divergence from a full prefill, nats, logarithmic; left is closer. Hollow: below 1e-6.",
        ),
    ]
    return figures(shown)


def speed_and_distance(methods: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], of: str) -> tuple[str, str]:
    """Two drawings of the methods of ``cells``: speed-up over dense, and mean KL with the yardstick's."""
    rounding = max(cell["yardstick"]["mean_kl"] for cell in cells)
    return (
        intervals(f"Speed-up over dense, {of}", dots(methods, "speedup", times), mark=("dense", 1.0)),
        intervals(
            f"Mean KL from dense, {of}", dots(methods, "mean_kl", nats), log=True, mark=("dense bfloat16", rounding)
        ),
    )


def dots(methods: Mapping[str, Any], key: str, show: Callable[[float], str]) -> list[Dot]:
    """A dot for each method that has the figure, but dense."""
    return [
        Dot(name, found[key]["value"], found[key]["low"], found[key]["high"], figure(found[key], show), _colour(name))
        for name, found in methods.items()
        if key in found and name != "dense"
    ]


def _colour(name: str) -> str:
    return _COLOURS.get(name, "reused" if name.startswith(OURS) and name != "kvcomm-paper" else "new")


def _table(heading: str, methods: Mapping[str, Any], note: str) -> str:
    columns = columns_of(methods)
    rows = []
    for name, found in methods.items():
        cells = [(name, name)]
        for column in columns:
            entry = found.get(column.key)
            cells.append((figure(entry, column.show), str(entry["value"])) if entry else ("", ""))
        rows.append(cells)
    tests = [
        f"{name}: p {found['mcnemar_p']:.2g}"
        for name, found in methods.items()
        if name != "dense" and "mcnemar_p" in found
    ]
    ranks = [
        f"{name}: {found['estimate']['spearman']:.2f} over {found['estimate']['n']} calls"
        for name, found in methods.items()
        if "estimate" in found
    ]
    said = [note] if note else []
    said += [f"Scores against dense, McNemar's exact test: {', '.join(tests)}."] if tests else []
    said += [f"Rank correlation of expected error and true KL: {', '.join(ranks)}."] if ranks else []
    return sortable(heading, ("method", *(column.heading for column in columns)), rows, " ".join(said))


def _methods(result: Mapping[str, Any]) -> str:
    about: dict[str, str] = {}
    for cell in result["cells"]:
        about |= cell["about"]
    return sortable("Methods", ("method", "what it does"), [[(n, n), (words, words)] for n, words in about.items()])
