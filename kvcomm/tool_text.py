"""Canonical text of tool definitions: the same tools give the same text, whatever order they and their keys came in.

Keys of objects are sorted at every depth. Of arrays only ``required``, which is a set, is sorted; the order of
``enum``, ``oneOf``, ``anyOf``, ``allOf`` and of examples is kept. Separators are compact and characters are not
escaped. It changes what the model sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvcomm.errors import InvalidInput

_DATA = frozenset({"default", "enum", "const", "example", "examples"})
"""Keywords whose values are data: ``required`` inside them means nothing."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name: a name that looks like a keyword is none."""


def tool_name(tool: Mapping[str, Any]) -> str:
    """The function's name, bare or inside OpenAI's ``{"type": "function", "function": {…}}``.

    Raises:
        InvalidInput: there is none.
    """
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"a tool has no name: {str(tool)[:80]}; give it one")
    return name


def canonical_tool(tool: Mapping[str, Any]) -> str:
    """One tool's canonical text.

    Raises:
        InvalidInput: no name, or a value that JSON does not have.
    """
    name = tool_name(tool)
    try:
        return canonical_json(_schema(tool))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"tool {name!r} is not JSON ({error}); give numbers, texts, lists and objects") from None


def canonical_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The canonical text of each tool, sorted by name; one tool is one segment."""
    return tuple(canonical_tool(tool) for tool in sorted(tools, key=tool_name))


def sorted_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tool with its keys in canonical order, for chat templates, which write the JSON themselves.

    Raises:
        InvalidInput: as canonical_tool.
    """
    ordered: dict[str, Any] = json.loads(canonical_tool(tool))
    return ordered


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys, for a call's arguments and results; the order of arrays is kept."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _schema(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _keyword(key, inner) for key, inner in value.items()}
    return [_schema(item) for item in value] if isinstance(value, list | tuple) else value


def _keyword(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _schema(schema) for name, schema in value.items()}
    if key == "required" and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return _schema(value)
