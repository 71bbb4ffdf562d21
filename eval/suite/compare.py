"""Two runs of a preset side by side: what became better, what worse, and what cannot be told apart.

Prompts are paired: the same case of the same cell before and after (eval/suite/pairing.py). A verdict is a sign-flip
test's (eval/figures/sign_flip.py). All verdicts together are meant to be right in 95 of 100 comparisons, so each is
taken at 0.05 / (number of figures that differ), Bonferroni's level; figures that differ in no prompt can get none and
are not counted (R. E. Tarone, Biometrics 46, 1990). From so few prompts that not even all of them moving one way could
reach that level nothing is concluded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from eval.figures.sign_flip import needed, sign_flip
from eval.figures.statistics import Estimate, by_prompt, mean_difference
from eval.files.output import markdown_table
from eval.pages.markdown_text import plain
from eval.suite.files import read_suite
from eval.suite.pairing import Rows, Unpaired, named, pair, settings
from kvcomm.errors import InvalidInput

WORSE, INCOMPLETE = 3, 4
_HEAD = ("verdict", "method", "figure", "before", "after", "difference", "95 % interval", "p", "prompts")
LEVEL = 0.05
RELATIVE, ABSOLUTE = 1e-6, 1e-7
"""Values of a prompt no further apart than this are the same: sums of floats in another order differ so much."""
Verdict = Literal["better", "worse", "same", "cannot be told apart", "too few prompts"]
Values = dict[str, float]


@dataclass(frozen=True)
class Change:
    """One figure of one method.

    Attributes:
        difference: mean over prompts of after - before, with its 95 % bootstrap interval.
        p: of the sign-flip test; the verdict is taken from it, not from the interval.
    """

    method: str
    metric: str
    before: float
    after: float
    difference: Estimate
    p: float
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All figures that both runs have.

    Attributes:
        level: the largest p from which a change is concluded.
        needed: prompts below which nothing is concluded.
        settings: lines on what the runs differ in besides figures.
        unpaired: cells, methods, cases and figures that could not be compared.
    """

    changes: tuple[Change, ...]
    level: float
    needed: int
    settings: tuple[str, ...]
    unpaired: tuple[Unpaired, ...]

    @property
    def worse(self) -> list[Change]:
        """What became worse."""
        return [change for change in self.changes if change.verdict == "worse"]

    @property
    def status(self) -> int:
        """Exit status: WORSE, else INCOMPLETE if a cell failed or ``before`` has what was not compared, else 0."""
        return WORSE if self.worse else INCOMPLETE if any(one.lost for one in self.unpaired) else 0


def _relative_ttft(rows: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> Values:
    own, true = _times(rows), _times(dense)
    if wrong := [case for case, seconds in true.items() if not seconds > 0]:
        raise InvalidInput(f"{wrong[0]}: a dense TTFT of {true[wrong[0]]} s; measure again")
    return {case: own[case] / true[case] for case in own if case in true}


def _times(rows: Sequence[Mapping[str, Any]]) -> Values:
    timed = [row | {"t": float(np.mean(row["ttft_s"]))} for row in rows if row["ttft_s"]]
    return by_prompt(timed, "t")


def _column(name: str) -> Callable[..., Values]:
    return lambda rows, dense: by_prompt([row for row in rows if name in row], name)


def _judge(rows: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]) -> Values:
    return by_prompt(
        [row | {"same": row["choice"] == row["dense_choice"]} for row in rows if row.get("choice")], "same"
    )


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


@dataclass(frozen=True)
class _Pair:
    """A figure's values, a prompt each; what does not differ beyond floating point has a difference of 0."""

    method: str
    metric: str
    sign: int
    old: list[float]
    new: list[float]

    @property
    def differences(self) -> list[float]:
        return [0.0 if _same(a, b) else b - a for a, b in zip(self.old, self.new, strict=True)]


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def compare_suites(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the cells and methods that both results have; dense itself is what the others are measured by.

    Raises:
        InvalidInput: there is no figure that both have.
    """
    paired = pair(before, after)
    unpaired = list(paired.unpaired)
    pairs: list[_Pair] = []
    for method in paired.before:
        for metric, (take, sign) in METRICS.items():
            if method == "dense" and metric != "score":
                continue
            old, new = _values(take, paired.before, method), _values(take, paired.after, method)
            cases = [case for case in old if case in new]
            for when, mine, others in (("before", old, new), ("after", new, old)):
                if alone := [case for case in mine if case not in others]:
                    said = f"{method}, {metric}: {named(alone)} of {len(mine)} prompts only {when}"
                    unpaired.append(Unpaired("figure", said, when == "before"))
            if cases:
                pairs.append(_Pair(method, metric, sign, [old[c] for c in cases], [new[c] for c in cases]))
    if not pairs:
        why = "; ".join(one.said for one in unpaired) or "no cells, or none with figures besides dense ones"
        raise InvalidInput(f"nothing to compare: {why}")
    level = LEVEL / max(sum(any(one.differences) for one in pairs), 1)
    changes = tuple(_change(one, level) for one in pairs)
    return Comparison(changes, level, needed(level), tuple(settings(before, after)), tuple(unpaired))


def _values(take: Callable[..., Values], rows: Rows, method: str) -> Values:
    return take(rows[method], rows.get("dense", []))


def _change(one: _Pair, level: float) -> Change:
    p = sign_flip(one.differences)
    verdict: Verdict = "cannot be told apart"
    if not any(one.differences):
        verdict = "same"
    elif len(one.old) < needed(level):
        verdict = "too few prompts"
    elif p <= level:
        verdict = "better" if one.sign * sum(one.differences) > 0 else "worse"
    before, after = float(np.mean(one.old)), float(np.mean(one.new))
    return Change(one.method, one.metric, before, after, mean_difference(one.old, one.new), p, verdict)


def lines(found: Comparison) -> list[str]:
    """The comparison as Markdown: other settings, what changed, what cannot be told, the rest counted and named."""
    said = [
        *(f"{plain(said)}\n" for said in found.settings),
        f"{len(found.changes)} figures compared, paired by prompt. A change is concluded from p ≤ {found.level:.2g} of "
        "a sign-flip test: at most 1 in 20 comparisons then sees any change where there is none. Nothing is concluded "
        f"from fewer than {found.needed} prompts. Intervals are 95 % bootstrap intervals, each figure's by itself.",
        "",
    ]
    rows = [
        [
            verdict, c.method, c.metric, f"{c.before:.4g}", f"{c.after:.4g}", f"{c.difference.value:+.3g}",
            f"{c.difference.low:+.3g} to {c.difference.high:+.3g}", f"{c.p:.2g}", str(c.difference.n),
        ]
        for verdict in ("worse", "better", "cannot be told apart", "too few prompts")
        for c in found.changes
        if c.verdict == verdict
    ]  # fmt: skip
    said.append(markdown_table(_HEAD, rows))
    count = sum(change.verdict == "same" for change in found.changes)
    return [*said, "", f"The same in every prompt: {count} figures.", *_not_compared(found.unpaired)]


def _not_compared(unpaired: Sequence[Unpaired]) -> list[str]:
    counts: Counter[str] = Counter()
    for one in unpaired:
        counts[one.kind] += one.count
    if not counts:
        return []
    counted = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())
    return [f"Not compared: {counted}.", "", *(f"- {plain(one.said)}" for one in unpaired)]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Results before a change.")],
    after: Annotated[Path, typer.Argument(help="Results of the same preset after it.")],
) -> None:
    """Say what became better, worse, or cannot be told apart.

    Exit status: 3 if anything became worse, else 4 if a cell failed or something of BEFORE could not be compared.
    """
    found = compare_suites(read_suite(before), read_suite(after))
    typer.echo("\n".join(lines(found)))
    if found.status:
        raise typer.Exit(found.status)
