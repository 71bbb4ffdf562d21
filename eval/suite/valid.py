"""What a results file must hold for its pages, checked: every error says where, what was seen, what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvcomm.errors import InvalidInput

Check = Callable[[Any, str], None]
_REMEDY = "measure again, or take the file of this version"


def check_suite(result: Mapping[str, Any]) -> None:
    """Check all that is read of a results file but its kind.

    Raises:
        InvalidInput: something is missing or of another type.
    """
    _fields(result, "", _HEAD, _HEAD_OR_NOT)
    names: set[str] = set()
    for n, cell in enumerate(result["cells"]):
        if cell["name"] in names:
            _refuse(f"cells[{n}].name", cell["name"], "another name than the cells before it")
        names.add(cell["name"])
        _check_cases(cell, f"cells[{n}]")
    if result["pooled"] and not any(cell["topology"] == "full" for cell in result["cells"]):
        _refuse("pooled", result["pooled"], "empty where no cell is fully connected")
    _check_texts(result)


def _check_cases(cell: Mapping[str, Any], where: str) -> None:
    """Each method has rows behind the first call, all of them of the same prompts."""
    cases: dict[str, set[str]] = {name: set() for name in cell["methods"]}
    for n, row in enumerate(cell["rows"]):
        if row["method"] not in cases:
            _refuse(f"{where}.rows[{n}].method", row["method"], f"one of {where}.methods")
        if "choice" in row and "dense_choice" not in row:
            raise InvalidInput(f"it lacks {where}.rows[{n}].dense_choice; {_REMEDY}")
        if row["agent"] != cell["first"]:
            cases[row["method"]].add(row["case"])
    for name, seen in cases.items():
        if not seen or seen != next(iter(cases.values())):
            _refuse(f"{where}.rows of {name}", sorted(seen), "of the same prompts as those of the other methods")


def _refuse(where: str, value: Any, wanted: str) -> None:
    seen = repr(value)
    raise InvalidInput(f"{where} is {seen if len(seen) <= 60 else seen[:57] + '...'}, it must be {wanted}; {_REMEDY}")


def _fields(value: Any, where: str, needed: Mapping[str, Check], or_not: Mapping[str, Check] | None = None) -> None:
    """An object's fields, each by its check; those of ``or_not`` may be absent, others are not looked at."""
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    inside = f"{where}." if where else ""
    missing = [f"{inside}{name}" for name in needed if name not in value]
    if missing:
        raise InvalidInput(f"it lacks {', '.join(missing[:5])}; {_REMEDY}")
    for name, check in {**needed, **(or_not or {})}.items():
        if name in value:
            check(value[name], f"{inside}{name}")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        _refuse(where, value, "a text")


def _number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        _refuse(where, value, "a number")


def _mark(value: Any, where: str) -> None:
    """A number, or true or false that counts as one."""
    if not isinstance(value, bool):
        _number(value, where)


def _seconds(value: Any, where: str) -> None:
    _number(value, where)
    if value <= 0:
        _refuse(where, value, "above 0")


def _whole(least: int) -> Check:
    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**53:
            _refuse(where, value, f"a whole number of at least {least}")

    return check


def _list(of: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            _refuse(where, value, "a list")
        for n, item in enumerate(value):
            of(item, f"{where}[{n}]")

    return check


def _map(of: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        for name, item in value.items():
            of(item, f"{where}.{name}")

    return check


def _object(needed: Mapping[str, Check], or_not: Mapping[str, Check] | None = None) -> Check:
    return lambda value, where: _fields(value, where, needed, or_not)


def _method(value: Any, where: str) -> None:
    """A method's figures; a score stands with what is said beside it."""
    scored: dict[str, Check] = {}
    if isinstance(value, dict) and "score" in value:
        scored = {"score_difference": _FIGURE, "mcnemar_p": _number}
    _fields(value, where, dict.fromkeys(_FIGURES, _FIGURE) | scored, _METHOD_OR_NOT)


def _check_texts(result: Any) -> None:
    """No half of a surrogate pair anywhere: it could not be written into a page."""
    for where, text in _texts(result):
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse(where, text, "whole characters, not half a surrogate pair")


def _texts(result: Any) -> Iterator[tuple[str, str]]:
    """Every text, names of fields too, with its place."""
    left = [("", result)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, list):
            left += [(f"{where}[{n}]", item) for n, item in enumerate(value)]
        elif isinstance(value, dict):
            for name, item in value.items():
                yield f"a field's name in {where or 'the file'}", name
                left.append((f"{where}.{name}" if where else name, item))


_COUNT = _whole(1)
_FIGURE = _object({"value": _number, "low": _number, "high": _number, "n": _whole(0)})
_FIGURES = ("mean_kl", "first_kl", "top1", "first_token", "reuse", "flops_saved")
_METHOD_OR_NOT = {
    **dict.fromkeys(
        (
            "speedup",
            "score",
            "judge",
            "ttft_p50",
            "ttft_p95",
            "ttft_p99",
            "held_bytes",
            "identical",
            "score_difference",
        ),
        _FIGURE,
    ),
    "mcnemar_p": _number,
    "estimate": _object({"spearman": _number, "n": _whole(0)}),
}
_SIZES = ("prompts", "prompt_tokens", "fill_prompts", "answer_tokens", "repeats")
_ROW = _object(
    {"case": _text, "agent": _text, "method": _text, "ttft_s": _list(_seconds), "mean_kl": _number},
    dict.fromkeys(("first_kl", "top1", "score", "reuse", "flops"), _mark),
)
_CELL = _object(
    {
        "name": _text, "task": _text, "topology": _text, "calls": _COUNT, "agents": _COUNT, "first": _text,
        "trial": _object(dict.fromkeys(_SIZES, _whole(0))), "about": _map(_text), "seconds": _number,
        "yardstick": _object({"mean_kl": _number}), "methods": _map(_method), "rows": _list(_ROW),
    }
)  # fmt: skip
_HEAD: dict[str, Check] = {
    "model": _text, "model_digest": _text, "threads": _COUNT, "versions": _map(_text), "machine": _text,
    "preset": _text, "command": _text, "cells": _list(_CELL), "pooled": _map(_method),
    "failed": _list(_object({"cell": _text, "error": _text})),
}  # fmt: skip
_HEAD_OR_NOT: dict[str, Check] = {
    "date": _text, "code": _text, "remark": _text, "jobs": _COUNT, "seed": _whole(0),
}  # fmt: skip
