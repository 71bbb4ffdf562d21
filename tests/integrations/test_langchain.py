"""LangChain: messages, calls of tools, pieces and usage come through, and a growing conversation costs its new turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from eval.models.chat_templates import CHATML_TOOLS
from kvcomm import InvalidInput
from kvcomm.integrations.langchain import ChatKVComm
from tests.hf.engines import state
from tests.integrations.forced import engine_with, saying

TALK = [SystemMessage("You count."), HumanMessage("How many?"), AIMessage("Let me see."), HumanMessage("Now?")]
AS_TEMPLATES_TAKE_IT = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Let me see."},
    {"role": "user", "content": "Now?"},
]


@tool
def add(x: int) -> int:
    """Adds."""
    return x


def test_an_answer_is_that_of_chat() -> None:
    engine = engine_with()
    model = ChatKVComm(engine=engine, agent="counter", options={"do_sample": False, "max_new_tokens": 5})
    message = model.invoke(TALK)
    alone = engine_with().chat(AS_TEMPLATES_TAKE_IT, do_sample=False, max_new_tokens=5)
    assert message.content == alone.text
    assert message.usage_metadata["input_tokens"] == alone.usage.prompt_tokens
    assert message.usage_metadata["output_tokens"] == 5
    again = asyncio.run(model.ainvoke(TALK))
    assert again.content == alone.text
    held = alone.usage.prompt_tokens - 1
    assert again.usage_metadata["input_token_details"] == {"cache_read": held}
    assert again.response_metadata["kvcomm"]["exact"] == held
    assert "counter/user" in again.response_metadata["kvcomm"]["plan"]
    assert model.batch([TALK, TALK])[1].content == alone.text


def test_a_call_of_a_tool_comes_back_and_is_held_from_its_decode() -> None:
    engine = engine_with(CHATML_TOOLS)
    said = '<tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>'
    asked: list[BaseMessage] = [HumanMessage("Add 3.")]
    calling = ChatKVComm(engine=engine, options=saying(engine, said)).bind_tools([add])
    message = calling.invoke(asked)
    assert message.content == ""
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("add", {"x": 3})]
    first = message.usage_metadata

    result = ToolMessage("3", tool_call_id=message.tool_calls[0]["id"])
    after = ChatKVComm(engine=engine, options=saying(engine, "3.")).bind_tools([add])
    reply = after.invoke([*asked, message, result])
    answered = first["output_tokens"] - 1  # the end of the turn is not held
    assert reply.content == "3." and reply.tool_calls == []
    assert reply.response_metadata["kvcomm"]["exact"] == first["input_tokens"] + answered


def test_a_call_that_cannot_be_read_is_named() -> None:
    engine = engine_with(CHATML_TOOLS)
    model = ChatKVComm(engine=engine, options=saying(engine, "<tool_call>{</tool_call>")).bind_tools([add])
    message = model.invoke("Add 3.")
    assert message.tool_calls == [] and message.invalid_tool_calls[0]["args"] == "{"


def test_stop_and_pieces() -> None:
    engine = engine_with()
    said = "One two three\nfour five six."
    model = ChatKVComm(engine=engine, options=saying(engine, said))
    assert model.invoke(TALK, stop=["three"]).content == "One two "
    chunks = list(ChatKVComm(engine=engine, options=saying(engine, said)).stream(TALK))
    assert "".join(str(chunk.content) for chunk in chunks) == said and len(chunks) > 3
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 10
    cut = ChatKVComm(engine=engine, options=saying(engine, said)).stream(TALK, stop=["three"])
    assert "".join(str(chunk.content) for chunk in cut) == "One two "


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda model: model.invoke(TALK, max_tokens=5), "max_tokens=5 is no argument"),
        (lambda model: model.bind_tools([add]), "does not write calls"),
        (lambda model: model.bind_tools([add], tool_choice="any"), "nothing makes the model call"),
        (lambda model: list(model.stream(TALK, num_beams=2)), "num_beams"),
    ],
)
def test_what_cannot_be_done_is_refused(wrong: Any, said: str) -> None:
    engine = engine_with()
    before = state(engine)
    with pytest.raises(InvalidInput, match=said):
        wrong(ChatKVComm(engine=engine))
    assert state(engine) == before
