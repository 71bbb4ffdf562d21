"""A results file as a document with plots: ``python -m eval report results/standard.json --doc docs/results.md``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.files.output import markdown_table, write_text
from eval.pages.markdown_text import code, plain
from eval.pages.quantities import nats, percent, times
from eval.suite.drawing import drawing
from eval.suite.losses import Losses, losses
from eval.suite.page import dots, speed_and_distance
from eval.suite.plots import intervals
from eval.suite.studies import Found, found_beside
from eval.suite.words import columns_of, figure, sizes, threads_of

OURS = "kvcomm"
BY_TASK = ("full", "independent")
"""Topologies in which a preset compares methods; in the others it compares topologies."""
RANGED = ("speedup", "mean_kl", "top1", "score", "judge")
"""Figures shown with their intervals; the others, ``PLAIN``, have theirs on the page."""
PLAIN = ("reuse", "flops_saved", "ttft_p50", "ttft_p95", "isolate", "held_bytes")
_LEAD = (
    "Made from [`{source}`]({source}) by `python -m eval report`; nothing here is edited by hand. Figures in brackets "
    "are 95 % intervals over prompts, n the number of prompts. Closeness is taken along the dense run's own "
    "greedy answers. Every cost of a call is inside TTFT, but for isolated bases, computed once a text: they have a "
    "column. [evaluation.md](evaluation.md) says how each figure is measured."
)


def write_doc(result: Mapping[str, Any], source: Path, doc: Path) -> list[Path]:
    """Write ``doc`` and its plots, ``<stem>-….svg`` beside it; return the paths, the document's first.

    Studies whose results lie beside ``source`` get a section each.

    Raises:
        InvalidInput: the file of such a study cannot be shown.
    """
    folder = os.path.relpath(source.parent, doc.parent)
    text, plots = document(result, f"{folder}/{source.name}", doc.stem, tuple(found_beside(source.parent)))
    write_text(doc, text)
    for name, plot in plots.items():
        write_text(doc.parent / name, plot)
    return [doc, *(doc.parent / name for name in plots)]


def document(
    result: Mapping[str, Any], source: str, stem: str, studies: Sequence[Found] = ()
) -> tuple[str, dict[str, str]]:
    """The document's text, and its plots by file name; studies stand between the topologies and where we lose."""
    plots: dict[str, str] = {}

    def shown(about: str, *parts: str) -> str:
        name = f"{stem}-{re.sub('[^a-z0-9]+', '-', about.lower())}.svg"
        plots[name] = drawing(parts)
        return f"![{plain(about)}]({name})"

    together = [cell for cell in result["cells"] if cell["topology"] == "full"]
    tasks = [cell for cell in result["cells"] if cell["topology"] in BY_TASK]
    patterns = [cell for cell in result["cells"] if cell["topology"] not in BY_TASK]
    parts = ["# Results", _LEAD.format(source=source), _repeat(result)]
    if result["failed"]:
        parts.append(_table("Not measured", ("cell", "why"), [[f["cell"], f["error"]] for f in result["failed"]]))
    if result["pooled"]:
        plot = shown("all tasks", *speed_and_distance(result["pooled"], together, "all tasks"))
        parts += ["## All tasks together", plot]
        parts.append(_methods(result["pooled"]))
    if tasks:
        parts.append("## By task")
    for cell in tasks:
        plot = shown(cell["name"], *speed_and_distance(cell["methods"], [cell], cell["name"]))
        parts += [f"### {plain(cell['name'])}", sizes(cell), plot, _methods(cell["methods"])]
    if patterns:
        parts += ["## By topology", shown("topologies", *_topologies(patterns))]
    for cell in patterns:
        parts += [f"### {plain(cell['name'])}", sizes(cell), _methods(cell["methods"])]
    for study in studies:
        parts += [f"## {study.heading}", study.about, study.repeat, shown(study.name, *study.plots), study.table]
    parts += [_losing(losses(result["cells"])), _about(result["cells"])]
    return "\n\n".join(parts) + "\n", plots


def _repeat(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    pairs = [
        ["command", code(result["command"])],
        ["date", result.get("date", "not recorded")],
        ["machine", f"{result['machine']}; {threads_of(result)}"],
        ["model", f"{result['model']}, weights {result['model_digest'][:16]}…"],
        ["versions", versions],
        ["code", f"{result['code'][:16]}…" if "code" in result else "not recorded"],
        ["preset", f"{result['preset']}, seed {result.get('seed', 0)}"],
    ]
    if "remark" in result:
        pairs.append(["remark", result["remark"]])
    return markdown_table(("", ""), pairs)


def _methods(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """A row a method; a column that nobody has a figure of is left out."""
    columns = columns_of(methods, (*RANGED, *PLAIN))
    scored = any("mcnemar_p" in found for found in methods.values())
    head = ["method", "n", *(column.heading for column in columns), *(["McNemar p"] if scored else [])]
    rows = []
    for name, found in methods.items():
        cells = [(_ranged if c.key in RANGED else _value)(found, c.key, c.show) for c in columns]
        p = f"{found['mcnemar_p']:.2g}" if "mcnemar_p" in found else ""
        rows.append([name, f"{found['mean_kl']['n']:.0f}", *cells, *([p] if scored else [])])
    return markdown_table(head, rows)


def _value(found: Mapping[str, Any], key: str, show: Callable[[float], str]) -> str:
    return show(found[key]["value"]) if key in found else ""


def _ranged(found: Mapping[str, Any], key: str, show: Callable[[float], str]) -> str:
    return interval_of(found[key], show) if key in found else ""


def interval_of(entry: Mapping[str, float], show: Callable[[float], str]) -> str:
    """``value (low to high)``; from one prompt there is no interval."""
    return figure(entry, show).rpartition("; n")[0] + ")" if entry["n"] >= 2 else show(entry["value"])


def _topologies(cells: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Our method in each topology."""
    ours = {cell["name"]: cell["methods"][OURS] for cell in cells if OURS in cell["methods"]}
    rounding = max(cell["yardstick"]["mean_kl"] for cell in cells)
    return (
        intervals(f"Speed-up of {OURS} over dense", dots(ours, "speedup", times, OURS), mark=("dense", 1.0)),
        intervals(
            f"Mean KL of {OURS} from dense",
            dots(ours, "mean_kl", nats, OURS),
            log=True,
            mark=("highest dense bf16", rounding),
        ),
    )


def _losing(found: Losses) -> str:
    """What speaks against us, as it stands; an interval that includes 0, or a p near 1, says that it may be chance."""
    slower = [
        [s.cell, s.method, s.than, interval_of(s.ours, times), interval_of(s.theirs, times)] for s in found.slower
    ]
    lower = [
        [s.cell, s.method, percent(s.dense), percent(s.score), interval_of(s.difference, lambda d: f"{d:+.2f}"),
         f"{s.p:.2g}"]
        for s in found.lower
    ]  # fmt: skip
    closer = [
        [
            c.cell, c.method, c.peer, nats(c.ours["mean_kl"]["value"]), nats(c.theirs["mean_kl"]["value"]),
            interval_of(c.difference.as_json(), lambda d: f"{d:+.2g}"),
            f"{_value(c.ours, 'reuse', percent)}, {_value(c.theirs, 'reuse', percent)}",
            f"{_value(c.ours, 'speedup', times)}, {_value(c.theirs, 'speedup', times)}",
            ", ".join(c.others),
        ]
        for c in found.closer
    ]  # fmt: skip
    said = (
        f"Of {found.compared} pairs of a cell and a method of ours, as they stand, whether by chance or not. A "
        "published method that reused nothing in a cell ran dense there, and is not compared. First tokens are held "
        "against dense and prefix reuse; methods that are sooner and further from dense, like re-rotation, are in the "
        "tables above, and so is what the studies above say against us."
    )
    unsolved = (
        f"Dense solves nothing in {'; '.join(found.unsolved)}: no score can be lower there." if found.unsolved else ""
    )
    return "\n\n".join(
        [
            "## Where we lose",
            said,
            _table(
                "The first token comes later", ("cell", "ours", "than", "dense ÷ TTFT, ours", "theirs"), slower
            ),
            _table(
                "The score is lower than dense's",
                ("cell", "ours", "dense", "score", "difference", "McNemar p"),
                lower,
            ),
            *([unsolved] if unsolved else []),
            _table(
                "A published method is closer to dense",
                ("cell", "ours", "closest", "mean KL, ours", "theirs", "theirs less ours", "reuse, ours and theirs",
                 "dense ÷ TTFT, ours and theirs", "also closer"),
                closer,
            ),
        ]
    )  # fmt: skip


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"### {heading}\n\n{markdown_table(head, rows) if rows else 'Nowhere.'}"


def _about(cells: Sequence[Mapping[str, Any]]) -> str:
    about: dict[str, str] = {}
    for cell in cells:
        about |= cell["about"]
    return "## Methods\n\n" + markdown_table(("method", "what it does"), [list(pair) for pair in about.items()])
