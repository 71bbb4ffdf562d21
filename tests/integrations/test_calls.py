"""Calls in an answer's text: read where they are whole, named where they are not."""

from __future__ import annotations

import pytest

from eval.models.chat_templates import CHATML_TOOLS
from kvcomm import InvalidInput
from kvcomm.integrations.calls import check_calls_can_be_read, read_calls
from tests.integrations.forced import engine_with


def test_calls_are_taken_out_of_the_text() -> None:
    one, two = '{"name": "f", "arguments": {"x": {"y": [1]}}}', '\n{"name": "g"}\n'
    found = read_calls(f"First.\n<tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>")
    assert found.text == "First."
    assert found.calls == (("f", {"x": {"y": [1]}}), ("g", {}))
    assert found.unread == ()


@pytest.mark.parametrize(
    "wrong", ["", "{", "[]", "1", '{"name": 1}', '{"name": "f", "arguments": "x"}', '{"arguments": {}}', "[" * 100_000]
)
def test_what_is_no_call_is_named_and_not_run(wrong: str) -> None:
    found = read_calls(f"a<tool_call>{wrong}</tool_call>b")
    assert found.text == "ab" and found.calls == ()
    assert found.unread[0][0] == wrong and found.unread[0][1]


def test_a_call_that_is_cut_stays_text() -> None:
    assert read_calls('<tool_call>{"name": "f"').text == '<tool_call>{"name": "f"'


def test_templates_that_write_calls_otherwise_are_refused() -> None:
    engine = engine_with()
    with pytest.raises(InvalidInput, match="does not write calls as <tool_call>"):
        check_calls_can_be_read(engine, {})
    check_calls_can_be_read(engine, {"chat_template": CHATML_TOOLS})
