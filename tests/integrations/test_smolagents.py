"""smolagents: what its agents hand over becomes a conversation, and what they get is Engine.chat's answer."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents import Tool
from smolagents.models import ChatMessage, MessageRole, get_tool_json_schema

from eval.models.chat_templates import CHATML_TOOLS
from kvcomm import InvalidInput
from kvcomm.integrations.smolagents import KVCommModel
from kvcomm.tool_text import sorted_tool
from tests.hf.engines import state
from tests.integrations.forced import engine_with, saying


class Add(Tool):  # type: ignore[misc]  # smolagents is untyped
    name = "add"
    description = "Adds."
    inputs = {"x": {"type": "integer", "description": "the one"}}
    output_type = "integer"

    def forward(self, x: int) -> int:
        return x


def text(role: MessageRole, content: str) -> ChatMessage:
    return ChatMessage(role, [{"type": "text", "text": content}])


TALK = [
    text(MessageRole.SYSTEM, "You count."),
    text(MessageRole.USER, "How many?"),
    text(MessageRole.ASSISTANT, "Let me see."),
    text(MessageRole.TOOL_CALL, "Calling add."),
    text(MessageRole.TOOL_RESPONSE, "It is 3."),
]
AS_TEMPLATES_TAKE_IT = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Let me see.\nCalling add."},
    {"role": "user", "content": "It is 3."},
]


def test_an_answer_is_that_of_chat() -> None:
    engine = engine_with()
    model = KVCommModel(engine, "counter", do_sample=False)
    message = model.generate(TALK, max_new_tokens=5)
    alone = engine_with().chat(AS_TEMPLATES_TAKE_IT, do_sample=False, max_new_tokens=5)
    expected = engine.tokenizer.apply_chat_template(AS_TEMPLATES_TAKE_IT, add_generation_prompt=True)["input_ids"]
    assert message.raw.plan.prompt.token_ids == tuple(expected)
    assert message.role == MessageRole.ASSISTANT and message.content == alone.text
    assert (message.token_usage.input_tokens, message.token_usage.output_tokens) == (len(expected), 5)
    assert {part.label.partition("/")[0] for part in message.raw.plan.prompt.parts} == {"counter"}
    assert model(TALK, max_new_tokens=5).raw.usage.exact == len(expected) - 1


def test_tools_are_shown_where_the_template_shows_tools_and_calls_are_read() -> None:
    """smolagents' own prompts list the tools too, so a template without any loses nothing."""
    engine = engine_with(CHATML_TOOLS)
    said = '{"name": "add", "arguments": {"x": 3}}'
    model = KVCommModel(engine, **saying(engine, said))
    message = model.generate(TALK, tools_to_call_from=[Add()])
    schema = sorted_tool(get_tool_json_schema(Add()))
    given = {"tools": [schema], "add_generation_prompt": True}
    expected = engine.tokenizer.apply_chat_template(AS_TEMPLATES_TAKE_IT, **given)["input_ids"]
    assert message.raw.plan.prompt.token_ids == tuple(expected)
    call = model.parse_tool_calls(message).tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("add", {"x": 3})

    without = engine_with()
    message = KVCommModel(without, **saying(without, said)).generate(TALK, tools_to_call_from=[Add()])
    plain = without.tokenizer.apply_chat_template(AS_TEMPLATES_TAKE_IT, add_generation_prompt=True)["input_ids"]
    assert message.raw.plan.prompt.token_ids == tuple(plain)


def test_a_stop_sequence_ends_the_answer_and_is_cut_off() -> None:
    engine = engine_with()
    model = KVCommModel(engine, **saying(engine, "Yes. Observation: none"))
    message = model.generate(TALK, stop_sequences=["Observation:"])
    assert message.content == "Yes. "
    assert message.raw.text == "Yes. Observation:"


def test_pieces_are_the_answer() -> None:
    engine = engine_with()
    said = "One two three\nfour five six."
    deltas = list(KVCommModel(engine, **saying(engine, said)).generate_stream(TALK))
    assert "".join(delta.content for delta in deltas) == said and len(deltas) > 3
    assert (
        deltas[-1].token_usage.output_tokens == len(engine.tokenizer(said, add_special_tokens=False)["input_ids"]) + 1
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"response_format": {"type": "json_schema"}}, "no structured outputs"),
        ({"max_tokens": 5}, "max_tokens=5 is no argument"),
        ({"cache_implementation": "static"}, "the prepared cache"),
    ],
)
def test_what_cannot_be_done_is_refused(wrong: dict[str, Any], said: str) -> None:
    engine = engine_with()
    before = state(engine)
    with pytest.raises(InvalidInput, match=said):
        KVCommModel(engine).generate(TALK, **wrong)
    assert state(engine) == before
