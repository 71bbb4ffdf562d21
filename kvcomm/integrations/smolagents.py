"""A smolagents Model on an engine: ``pip install 'kvcomm[smolagents]'``, docs/integrations.md."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from smolagents.models import (
    ChatMessage,
    ChatMessageStreamDelta,
    MessageRole,
    Model,
    remove_content_after_stop_sequences,
)
from smolagents.monitoring import TokenUsage

from kvcomm.errors import InvalidInput
from kvcomm.hf.chat import Tool, shows_tools
from kvcomm.hf.engine import Engine
from kvcomm.hf.reply import Reply
from kvcomm.hf.streaming import stream_chat

log = logging.getLogger(__name__)


class KVCommModel(Model):  # type: ignore[misc]  # smolagents is untyped
    """Answers for smolagents' agents through Engine.chat; agents on one engine reuse each other's KV.

    Args:
        engine: shared by as many models as there are agents.
        name: the agent whose conversation this is; what is learned is learned for its places. One model for each agent.
        options: further arguments of Engine.chat for every call: ``max_new_tokens``, ``policy``, ``do_sample``, ...

    A message's ``raw`` is kvcomm's Reply: its usage, its plan, its times.
    """

    def __init__(self, engine: Engine, name: str = "chat", **options: Any) -> None:
        model_id = str(getattr(engine.model.config, "name_or_path", "") or "kvcomm")
        super().__init__(flatten_messages_as_text=True, model_id=model_id, **options)
        self.engine, self.name = engine, name

    @property
    def supports_stop_parameter(self) -> bool:
        """Whatever the model is called, model.generate can stop at strings."""
        return True

    def generate(
        self,
        messages: list[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, str] | None = None,
        tools_to_call_from: list[Any] | None = None,
        **kwargs: Any,
    ) -> ChatMessage:
        """Answer; see smolagents' Model.generate.

        Raises:
            InvalidInput: ``response_format`` is asked for, or as Engine.chat.
        """
        talk, tools, options = self._call(messages, stop_sequences, response_format, tools_to_call_from, kwargs)
        reply = self.engine.chat(talk, tools, **options)
        text = remove_content_after_stop_sequences(reply.text, options.get("stop_strings"))
        return ChatMessage(MessageRole.ASSISTANT, text, raw=reply, token_usage=_usage(reply))

    def generate_stream(
        self,
        messages: list[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, str] | None = None,
        tools_to_call_from: list[Any] | None = None,
        **kwargs: Any,
    ) -> Generator[ChatMessageStreamDelta, None, None]:
        """As generate, in pieces; the last one carries the usage. A stop sequence is the last text that comes."""
        talk, tools, options = self._call(messages, stop_sequences, response_format, tools_to_call_from, kwargs)
        pieces = stream_chat(self.engine, talk, tools, **options)
        while True:
            try:
                yield ChatMessageStreamDelta(content=next(pieces))
            except StopIteration as ended:
                yield ChatMessageStreamDelta(content="", token_usage=_usage(ended.value))
                return

    def _call(
        self,
        messages: Sequence[ChatMessage | dict[str, Any]],
        stop_sequences: list[str] | None,
        response_format: Mapping[str, str] | None,
        tools_to_call_from: list[Any] | None,
        kwargs: dict[str, Any],
    ) -> tuple[list[dict[str, Any]], Sequence[Tool] | None, dict[str, Any]]:
        """Messages, tools and options for Engine.chat."""
        if response_format is not None:
            raise InvalidInput("response_format is given: model.generate has no structured outputs; leave it out")
        made = self._prepare_completion_kwargs(
            messages, stop_sequences, tools_to_call_from=tools_to_call_from, tool_choice=None, **kwargs
        )
        # A role is an enum there, and templates would print its name.
        talk = [{**message, "role": MessageRole(message["role"]).value} for message in made.pop("messages")]
        tools, stop = made.pop("tools", None), made.pop("stop", None)
        if tools and not shows_tools(self.engine.tokenizer, tools, made.get("template")):
            log.info("%s: the chat template shows no tools; the agent's own prompt lists them", self.name)
            tools = None
        if stop:
            made["stop_strings"] = list(stop)
        return talk, tools, {"name": self.name, **made}


def _usage(reply: Reply) -> TokenUsage:
    return TokenUsage(input_tokens=reply.usage.prompt_tokens, output_tokens=reply.usage.completion_tokens)
