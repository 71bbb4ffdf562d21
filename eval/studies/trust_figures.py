"""What the rows of ``eval trust`` come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvcomm.check.plot import rank_correlation

Row = Mapping[str, Any]
WATCHED = "watched "
"""How the names of methods begin that predict and do not act."""


def correlation(rows: Sequence[Row]) -> float | None:
    """Spearman's of predicted and measured KL over rows with an error; None where it is not defined."""
    points = [(row["predicted"], row["kl"]) for row in rows if row.get("predicted")]
    found = rank_correlation(points)
    return found if found == found else None


def summary(rows: Sequence[Row], max_kl: float) -> dict[str, Any]:
    """Of one method: closeness, what lies above, reuse, and how predictions stand to it."""
    judged = [row for row in rows if row.get("predicted")]
    return {
        "n": len(rows),
        "mean_kl": fmean(row["kl"] for row in rows),
        "largest_kl": max(row["kl"] for row in rows),
        "above": fmean(row["kl"] > max_kl for row in rows),
        "above_own_bound": fmean(row["kl"] > row["bound"] for row in judged) if judged else None,
        "reuse": fmean(row["reuse"] for row in rows),
        "more_computed": fmean(bool(row.get("added")) for row in rows),
        "mean_predicted": fmean(row["predicted"] for row in judged) if judged else None,
        "rank_correlation": correlation(rows),
    }


def figures(rows: Sequence[Row], hard: Sequence[Row], max_kl: float) -> dict[str, Any]:
    """Everything that is promised of trust, in numbers.

    ``balanced`` acts on its predictions. The ``watched`` predict and do not act, so that their predictions can be held
    against what then comes of them: together, from nothing recomputed to a third, and each depth alone. That is
    harder, since luck with an answer's few uncertain tokens weighs more there. ``unnoticed`` counts adversarial prompts
    above four times the bound whose prediction had kept it.
    """
    found: dict[str, Any] = {}
    for name, some in (("prompts", rows), ("adversarial", hard)):
        groups = {"watched": [row for row in some if row["method"].startswith(WATCHED)]}
        for row in some:
            groups.setdefault(row["method"], []).append(row)
        for method, mine in filter(lambda group: group[1], groups.items()):
            by_kind = {kind: summary([r for r in mine if r["kind"] == kind], max_kl) for kind in _kinds(mine)}
            found[f"{name}, {method}"] = {**summary(mine, max_kl), "by_kind": by_kind}
    acted = [row for row in hard if row["method"] == "balanced"]
    found["unnoticed"] = sum(row["kl"] > 4 * max_kl and row.get("bound", 0.0) <= max_kl for row in acted)
    return found


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))


def print_figures(found: Mapping[str, Any]) -> None:
    """A line each."""
    for name, figure in found.items():
        if not isinstance(figure, Mapping):
            print(f"{name:24} {figure}")
            continue
        _line(name, figure)
        for kind, own in figure["by_kind"].items():
            _line(f"  {kind}", own)


def _line(name: str, figure: Mapping[str, Any]) -> None:
    rank = "   –" if figure["rank_correlation"] is None else f"{figure['rank_correlation']:4.2f}"
    print(
        f"{name:24} n {figure['n']:3}  KL {figure['mean_kl']:.4f}  largest {figure['largest_kl']:.4f}  "
        f"above {figure['above']:4.0%}  reuse {figure['reuse']:4.0%}  more {figure['more_computed']:4.0%}  rank {rank}"
    )
