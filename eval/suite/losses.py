"""Where we lose, read out of a results file: first tokens that come later, lower scores, peers that are closer.

Everything is taken as it stands, significant or not; its interval and number of prompts say how sure it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.figures.statistics import Estimate, by_prompt, mean_difference
from eval.methods.registry import METHODS

OURS = tuple(name for name in METHODS if name.startswith("kvcomm") and name != "kvcomm-paper")
PEERS = frozenset(METHODS) - {*OURS, "dense", "exact", "oracle"}
"""Published methods, on bases of their own and on ours."""


@dataclass(frozen=True)
class Slower:
    """A method of ours whose first token comes later: ``than`` is dense or exact, ``speedup`` over dense."""

    cell: str
    method: str
    than: str
    ours: Mapping[str, float]
    theirs: Mapping[str, float]


@dataclass(frozen=True)
class LowerScore:
    """A method of ours that scores lower than dense on the same prompts; ``p`` is McNemar's."""

    cell: str
    method: str
    dense: float
    score: float
    difference: Mapping[str, float]
    p: float


@dataclass(frozen=True)
class Closer:
    """Peers of less mean KL than a method of ours; one that reused nothing ran dense, and is none.

    Attributes:
        peer: the closest one; ``others`` are the names of the rest.
        difference: peer less ours, nats, mean over the prompts that both have.
    """

    cell: str
    method: str
    peer: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    difference: Estimate
    others: tuple[str, ...]


@dataclass(frozen=True)
class Losses:
    """All of them, in the order of cells and methods; ``compared`` counts the pairs of a cell and a method of ours.

    ``unsolved`` names the cells in which dense scores 0, so that no method can score lower.
    """

    compared: int
    slower: tuple[Slower, ...]
    lower: tuple[LowerScore, ...]
    closer: tuple[Closer, ...]
    unsolved: tuple[str, ...]


def losses(cells: Sequence[Mapping[str, Any]]) -> Losses:
    """What the cells of a results file say against us."""
    ours = [(cell, name) for cell in cells for name in cell["methods"] if name in OURS]
    return Losses(
        len(ours),
        tuple(found for cell, name in ours for found in _slower(cell, name)),
        tuple(found for cell, name in ours for found in _lower(cell, name)),
        tuple(found for cell, name in ours for found in _closer(cell, name)),
        tuple(cell["name"] for cell in cells if cell["methods"].get("dense", {}).get("score", {}).get("value") == 0),
    )


def _slower(cell: Mapping[str, Any], name: str) -> Iterator[Slower]:
    mine = cell["methods"][name].get("speedup")
    for than in ("dense", "exact"):
        theirs = cell["methods"].get(than, {}).get("speedup")
        if mine and theirs and mine["value"] < theirs["value"]:
            yield Slower(cell["name"], name, than, mine, theirs)


def _lower(cell: Mapping[str, Any], name: str) -> Iterator[LowerScore]:
    found = cell["methods"][name]
    if "score" in found and found["score_difference"]["value"] < 0:
        difference, score = found["score_difference"], found["score"]["value"]
        yield LowerScore(cell["name"], name, score - difference["value"], score, difference, found["mcnemar_p"])


def _closer(cell: Mapping[str, Any], name: str) -> Iterator[Closer]:
    methods = cell["methods"]
    reusing = [peer for peer in methods if peer in PEERS and methods[peer]["reuse"]["value"] > 0]
    better = [peer for peer in reusing if methods[peer]["mean_kl"]["value"] < methods[name]["mean_kl"]["value"]]
    if better:
        first, *others = sorted(better, key=lambda peer: float(methods[peer]["mean_kl"]["value"]))
        mine, theirs = (_kl(cell, method) for method in (name, first))
        cases = [case for case in mine if case in theirs]
        difference = mean_difference([mine[case] for case in cases], [theirs[case] for case in cases])
        yield Closer(cell["name"], name, first, methods[name], methods[first], difference, tuple(others))


def _kl(cell: Mapping[str, Any], method: str) -> dict[str, float]:
    rows = [row for row in cell["rows"] if row["method"] == method and row["agent"] != cell["first"]]
    return by_prompt(rows, "mean_kl")
