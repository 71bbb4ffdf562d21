"""Checks of what callers pass: a value of the wrong type is named at the door, not deep inside."""

from __future__ import annotations

from typing import Any

from kvcomm.errors import InvalidInput


def need(value: object, kinds: type | tuple[type, ...], name: str, remedy: str) -> None:
    """Raise InvalidInput unless ``value`` is of one of ``kinds``; a bool is no number."""
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise InvalidInput(f"{name} is {shown(value)}; {remedy}")


def need_all(values: Any, kinds: type | tuple[type, ...], name: str, remedy: str) -> None:
    """Raise InvalidInput unless ``values`` is a list or tuple of nothing but ``kinds``."""
    need(values, (list, tuple), name, remedy)
    for value in values:
        need(value, kinds, f"one of {name}", remedy)


def shown(value: object) -> str:
    """The value as an error names it: in short, and with its type."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) < 40 else f"of type {kind}"
