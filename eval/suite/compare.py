"""Two runs of a preset side by side: what became better, what worse, and what cannot be told apart.

Prompts are paired: the same case of the same cell before and after. All verdicts together are meant to be right in 95
of 100 comparisons, so each is taken at 1 - 0.05 / (number of verdicts), and from so few prompts that not even all of
them moving one way could be told from chance nothing is concluded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from eval.statistics import Estimate, by_prompt, mean_difference
from eval.suite.files import read_suite

WORSE = 3
LEVEL = 0.05
Verdict = Literal["better", "worse", "same", "cannot be told apart", "too few prompts"]
Values = dict[str, float]


@dataclass(frozen=True)
class Change:
    """One figure of one method.

    Attributes:
        difference: mean over prompts of after - before, with its interval.
    """

    method: str
    metric: str
    before: float
    after: float
    difference: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All figures that both runs have.

    Attributes:
        confidence: of each interval.
        needed: prompts below which nothing is concluded.
        only: cells and methods that one run alone has.
    """

    changes: tuple[Change, ...]
    confidence: float
    needed: int
    only: tuple[str, ...]

    @property
    def worse(self) -> list[Change]:
        """What became worse."""
        return [change for change in self.changes if change.verdict == "worse"]


def _relative_ttft(rows: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> Values:
    own, true = _times(rows), _times(dense)
    return {case: own[case] / true[case] for case in own if case in true}


def _times(rows: Sequence[Mapping[str, Any]]) -> Values:
    timed = [row | {"t": float(np.mean(row["ttft_s"]))} for row in rows if row["ttft_s"]]
    return by_prompt(timed, "t")


def _column(name: str) -> Callable[..., Values]:
    return lambda rows, dense: by_prompt([row for row in rows if name in row], name)


def _judge(rows: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> Values:
    return by_prompt([row | {"same": row["choice"] == row["dense_choice"]} for row in rows if "choice" in row], "same")


METRICS: dict[str, tuple[Callable[..., Values], int]] = {
    "mean KL": (_column("mean_kl"), -1),
    "first-token KL": (_column("first_kl"), -1),
    "top-1 agreement": (_column("top1"), +1),
    "score": (_column("score"), +1),
    "judge consistency": (_judge, +1),
    "reuse": (_column("reuse"), +1),
    "prefill FLOPs": (_column("flops"), -1),
    "TTFT over dense": (_relative_ttft, -1),
}
"""How each is taken from rows and dense rows, by prompt, and which way is better."""


def compare_suites(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the cells and methods that both results have; dense itself is what the others are measured by."""
    sides = [_rows(result) for result in (before, after)]
    names = [
        {(cell["name"], name) for cell in result["cells"] for name in cell["methods"]} for result in (before, after)
    ]
    only = [
        f"{cell}, {name}: only {'before' if (cell, name) in names[0] else 'after'}"
        for cell, name in sorted(names[0] ^ names[1])
    ]
    pairs = []
    for method in dict.fromkeys(name for cell in after["cells"] for name in cell["methods"]):
        for metric, (take, sign) in METRICS.items():
            if method == "dense" and metric != "score":
                continue
            old, new = (take(side.get(method, []), side.get("dense", [])) for side in sides)
            cases = [case for case in old if case in new]
            if cases:
                pairs.append((method, metric, sign, [old[c] for c in cases], [new[c] for c in cases]))
    confidence = 1 - LEVEL / max(len(pairs), 1)
    needed = math.ceil(1 + math.log2(max(len(pairs), 1) / LEVEL))
    changes = tuple(_change(*pair, confidence, needed) for pair in pairs)
    return Comparison(changes, confidence, needed, tuple(only))


def _rows(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by method, without the first calls, their cases named by cell too."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        for row in cell["rows"]:
            if row["agent"] != cell["first"]:
                found.setdefault(row["method"], []).append(row | {"case": f"{cell['name']}: {row['case']}"})
    return found


def _change(
    method: str, metric: str, sign: int, old: Sequence[float], new: Sequence[float], confidence: float, needed: int
) -> Change:
    difference = mean_difference(old, new, confidence)
    verdict: Verdict = "cannot be told apart"
    if all(a == b for a, b in zip(old, new, strict=True)):
        verdict = "same"
    elif len(old) < needed:
        verdict = "too few prompts"
    elif difference.low > 0 or difference.high < 0:
        verdict = "better" if sign * difference.value > 0 else "worse"
    return Change(method, metric, float(np.mean(old)), float(np.mean(new)), difference, verdict)


def lines(found: Comparison) -> list[str]:
    """The comparison as Markdown: what changed first, then what cannot be told, the rest counted."""
    said = [
        f"{len(found.changes)} figures compared, paired by prompt, each at {found.confidence:.2%} so that together "
        f"they are wrong in 1 of 20 comparisons; nothing is concluded from fewer than {found.needed} prompts.",
        "",
        "| verdict | method | figure | before | after | difference | interval | prompts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for verdict in ("worse", "better", "cannot be told apart", "too few prompts"):
        for c in (change for change in found.changes if change.verdict == verdict):
            d = c.difference
            said.append(
                f"| {verdict} | {c.method} | {c.metric} | {c.before:.4g} | {c.after:.4g} | {d.value:+.3g} | "
                f"{d.low:+.3g} to {d.high:+.3g} | {d.n} |"
            )
    count = sum(change.verdict == "same" for change in found.changes)
    return [*said, "", f"The same in every prompt: {count} figures.", *(f"- {name}" for name in found.only)]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Results before a change.")],
    after: Annotated[Path, typer.Argument(help="Results of the same preset after it.")],
) -> None:
    """Say what became better, worse, or cannot be told apart; exit status 3 if anything became worse."""
    found = compare_suites(read_suite(before), read_suite(after))
    typer.echo("\n".join(lines(found)))
    if found.worse:
        raise typer.Exit(WORSE)
