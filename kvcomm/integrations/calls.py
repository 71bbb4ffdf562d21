"""Calls of tools in an answer: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The form that Hermes, Qwen 2.5 and 3, SmolLM3 and others of their kind are trained on. Others are not read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcomm.errors import InvalidInput
from kvcomm.hf.engine import Engine

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """An answer's text apart from the calls in it.

    Attributes:
        text: what stands outside the calls.
        calls: name and arguments of each.
        unread: text and error of those that are none.
    """

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    unread: tuple[tuple[str, str], ...]


def read_calls(text: str) -> Answer:
    """Take the calls out of an answer's text."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    unread: list[tuple[str, str]] = []
    for written in _CALL.findall(text):
        try:
            calls.append(_call(written))
        except (ValueError, RecursionError) as error:
            unread.append((written.strip(), str(error)))
    return Answer(_CALL.sub("", text), tuple(calls), tuple(unread))


def check_calls_can_be_read(engine: Engine, template: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless the chat template, or the one given, writes calls in the form that is read here."""
    tokenizer = engine.tokenizer
    written = template.get("chat_template") or tokenizer.chat_template
    if "<tool_call>" not in str(written):
        raise InvalidInput(
            f"the chat template of {tokenizer.name_or_path!r} does not write calls as <tool_call>…</tool_call>, the "
            "one form that is read; call engine.chat(messages, tools=...) and read its text yourself"
        )


def _call(written: str) -> tuple[str, Mapping[str, Any]]:
    found = json.loads(written)
    name, arguments = (found.get("name"), found.get("arguments", {})) if isinstance(found, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call is an object with a name and an object of arguments")
    return name, arguments
