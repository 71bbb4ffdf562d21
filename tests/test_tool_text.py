"""Canonical text: order of tools, keys and required does not show; order that means something stays."""

from __future__ import annotations

import json

import pytest

from kvcomm.errors import InvalidInput
from kvcomm.tool_text import canonical_json, canonical_tool, canonical_tools

TOOL = {
    "name": "find",
    "parameters": {
        "type": "object",
        "required": ["what", "how"],
        "properties": {
            "what": {"type": "string", "enum": ["b", "a"], "description": "naïve"},
            "how": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["z", "y"]}]},
            "required": {"type": "array", "default": {"required": ["d", "c"], "a": 1}},
            "default": {"type": "object", "required": ["q", "p"]},
        },
    },
}
TEXT = (
    '{"name":"find","parameters":{"properties":{"default":{"required":["p","q"],"type":"object"},'
    '"how":{"anyOf":[{"type":"string"},{"required":["y","z"],"type":"object"}]},'
    '"required":{"default":{"a":1,"required":["d","c"]},"type":"array"},'
    '"what":{"description":"naïve","enum":["b","a"],"type":"string"}},"required":["how","what"],"type":"object"}}'
)


def test_one_tool_by_hand() -> None:
    assert canonical_tool(TOOL) == TEXT
    assert canonical_tool(json.loads(TEXT)) == TEXT


def test_tools_are_sorted_by_name_bare_or_wrapped() -> None:
    wrapped = {"type": "function", "function": {"name": "add"}}
    texts = ('{"function":{"name":"add"},"type":"function"}', TEXT)
    assert canonical_tools([TOOL, wrapped]) == canonical_tools([wrapped, TOOL]) == texts


def test_arguments_keep_the_order_of_their_lists() -> None:
    assert canonical_json({"b": [2, 1], "a": None}) == '{"a":null,"b":[2,1]}'


@pytest.mark.parametrize("tool", [{}, {"name": ""}, {"name": 3}, {"function": "f"}, {"function": {"title": "f"}}])
def test_a_tool_without_a_name_is_refused(tool: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="no name"):
        canonical_tool(tool)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"x"])
def test_what_json_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="'f' is not JSON"):
        canonical_tool({"name": "f", "default": value})
