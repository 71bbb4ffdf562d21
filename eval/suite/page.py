"""The suite's page: one self-contained file made from the results file and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.pages.page import facts as facts_section
from eval.pages.page import figures, page, sortable, tiles
from eval.pages.quantities import nats, percent, times
from eval.suite.brief import overview
from eval.suite.plots import Dot, intervals
from eval.suite.words import columns_of, facts_of, figure, interval, sizes

OURS = "kvcomm"
_COLOURS = {"dense": "dense", "exact": "exact", "oracle": "recomputed"}
_LEAD = (
    "Time to first token, reuse and closeness to a full prefill. Intervals are 95 % intervals over prompts; "
    "n is the number of prompts. Closeness is taken along the dense run's own greedy answers. All costs of a call "
    "are in TTFT, but for isolated bases, computed once a text: they have a column."
)


def suite_page(result: Mapping[str, Any]) -> str:
    """The page of a results file."""
    sections = []
    first = overview(result)
    if first is not None:
        sections += [tiles(_tiles(first.methods), f"{OURS}, {first.name}")]
        sections.append(_plots(first.cells, first.methods, first.name))
        if first.pooled:
            sections.append(_table(f"{first.name[0].upper()}{first.name[1:]} together", first.methods, ""))
    if result["failed"]:
        rows = [[(entry["cell"], ""), (entry["error"], "")] for entry in result["failed"]]
        sections.append(sortable("Not measured", ("cell", "why"), rows))
    if result["cells"]:
        sections.append(_methods(result))
    for cell in result["cells"]:
        sections.append(_table(cell["name"], cell["methods"], sizes(cell)))
        if first is not None and cell not in first.cells:
            sections.append(_plots([cell], cell["methods"], cell["name"]))
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


def _plots(cells: Sequence[Mapping[str, Any]], methods: Mapping[str, Any], of: str) -> str:
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


def dots(methods: Mapping[str, Any], key: str, show: Callable[[float], str], of: str = "") -> list[Dot]:
    """A dot for each method that has the figure, but dense; in the colour of the method ``of`` where that is given."""
    return [
        Dot(
            name,
            found[key]["value"],
            found[key]["low"],
            found[key]["high"],
            figure(found[key], show),
            _colour(of or name),
        )
        for name, found in methods.items()
        if key in found and name != "dense"
    ]


def _colour(name: str) -> str:
    return _COLOURS.get(name, "reused" if name.startswith(OURS) and name != "kvcomm-paper" else "new")


def _table(name: str, methods: Mapping[str, Any], note: str) -> str:
    columns = columns_of(methods)
    rows = []
    for method, found in methods.items():
        cells = [(method, method)]
        for column in columns:
            entry = found.get(column.key)
            cells.append((figure(entry, column.show), str(entry["value"])) if entry else ("", ""))
        rows.append(cells)
    heads = [column.heading for column in columns]
    for heading, extra in (("McNemar p of scores", _mcnemar), ("rank of expected error", _ranks)):
        cells = [extra(found) for found in methods.values()]
        if any(text for text, _ in cells):
            heads.append(heading)
            rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return sortable(name, ("method", *heads), rows, note)


def _mcnemar(found: Mapping[str, Any]) -> tuple[str, str]:
    return (f"{found['mcnemar_p']:.2g}", str(found["mcnemar_p"])) if "mcnemar_p" in found else ("", "")


def _ranks(found: Mapping[str, Any]) -> tuple[str, str]:
    estimate = found.get("estimate")
    return (f"{estimate['spearman']:.2f} ({estimate['n']} calls)", str(estimate["spearman"])) if estimate else ("", "")


def _methods(result: Mapping[str, Any]) -> str:
    about: dict[str, str] = {}
    for cell in result["cells"]:
        about |= cell["about"]
    return sortable("Methods", ("method", "what it does"), [[(n, n), (words, words)] for n, words in about.items()])
