"""What of two results files can be held against each other: the same case of the same cell, measured in one setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Result = Mapping[str, Any]
Rows = dict[str, list[dict[str, Any]]]
_SHOWN = 5


@dataclass(frozen=True)
class Unpaired:
    """Something that cannot be compared.

    Attributes:
        count: how many of its kind.
        lost: whether ``before`` has it, or would have had it, and the comparison therefore covers less than it should.
    """

    kind: Literal["cell", "method", "case", "figure"]
    said: str
    lost: bool
    count: int = 1


@dataclass(frozen=True)
class Pairing:
    """Rows by method of both sides, behind the first calls, their cases named by cell too: those of paired cases."""

    before: Rows
    after: Rows
    unpaired: tuple[Unpaired, ...]


def pair(before: Result, after: Result) -> Pairing:
    """Pair cells by name, if they were measured under the same trial, then methods, then cases."""
    sides: tuple[Rows, Rows] = ({}, {})
    unpaired = list(_failed(before, after))
    failed = {entry["cell"] for result in (before, after) for entry in result.get("failed", ())}
    cells = [{cell["name"]: cell for cell in result["cells"]} for result in (before, after)]
    for name in dict.fromkeys([*cells[0], *cells[1]]):
        old, new = (side.get(name) for side in cells)
        if old is None or new is None:
            if name not in failed:
                unpaired.append(Unpaired("cell", f"{name}: only {_where(old)}", old is not None))
        elif old["trial"] != new["trial"]:
            said = differing(old["trial"], new["trial"])
            unpaired.append(Unpaired("cell", f"{name}: {'; '.join(said)}; not compared", True))
        else:
            for method in dict.fromkeys([*old["methods"], *new["methods"]]):
                unpaired += _pair_method(name, method, old, new, sides)
    return Pairing(*sides, tuple(unpaired))


def _failed(before: Result, after: Result) -> Iterator[Unpaired]:
    for result, when in ((before, "before"), (after, "after")):
        for entry in result.get("failed", ()):
            yield Unpaired("cell", f"{entry['cell']}: failed {when} ({entry['error']})", True)


def _pair_method(
    cell: str, method: str, old: Result, new: Result, sides: Sequence[dict[str, list[dict[str, Any]]]]
) -> Iterator[Unpaired]:
    """Add the rows of paired cases to ``sides``, and say which cases and methods are not paired."""
    if method not in old["methods"] or method not in new["methods"]:
        here = old if method in old["methods"] else None
        yield Unpaired("method", f"{cell}, {method}: only {_where(here)}", here is not None)
        return
    rows = [[r for r in one["rows"] if r["method"] == method and r["agent"] != one["first"]] for one in (old, new)]
    cases = [_calls(side) for side in rows]
    for when, mine, others in (("before", *cases), ("after", *reversed(cases))):
        if alone := [case for case in mine if case not in others]:
            said = f"{cell}, {method}: {named(alone)} of {len(mine)} cases only {when}"
            yield Unpaired("case", said, when == "before", len(alone))
    both = [case for case in cases[0] if case in cases[1]]
    if other := [case for case in both if cases[0][case] != cases[1][case]]:
        said = f"{cell}, {method}: {named(other)} of {len(both)} cases with other calls; not compared"
        yield Unpaired("case", said, True, len(other))
    for side, mine in zip(sides, rows, strict=True):
        side.setdefault(method, []).extend(
            row | {"case": f"{cell}: {row['case']}"} for row in mine if row["case"] in both and row["case"] not in other
        )


def _calls(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For each case the agents that were called."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row["agent"])
    return {case: sorted(agents) for case, agents in found.items()}


def _where(old: object) -> str:
    return "after" if old is None else "before"


def named(cases: Sequence[str]) -> str:
    """How many cases, and the names of the first."""
    more = ", …" if len(cases) > _SHOWN else ""
    return f"{len(cases)} ({', '.join(cases[:_SHOWN])}{more})"


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``name value, then value`` for each entry that differs."""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name, 'unknown')}, then {new.get(name, 'unknown')}" for name in names]


def settings(before: Result, after: Result) -> list[str]:
    """Lines on what else the runs differ in; none where they were measured under the same setting."""
    said = []
    weights = [{"weights": f"{result.get('model_digest', 'unknown'):.16}"} for result in (before, after)]
    if other := differing(*weights):
        said.append(f"Other weights: model {before.get('model')}, then {after.get('model')} ({other[0]}).")
    if others := differing(_setting(before), _setting(after)):
        said.append(f"differ: {'; '.join(others)}")
    return said


def _setting(result: Result) -> dict[str, Any]:
    names = ("preset", "seed", "threads", "jobs", "machine", "code")
    found = {name: result[name] for name in names if name in result}
    if "code" in found:
        found["code"] = f"{found['code']:.16}"
    return found | dict(result.get("versions") or {})
