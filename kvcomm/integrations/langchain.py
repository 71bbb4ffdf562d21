"""A LangChain chat model on an engine: ``pip install 'kvcomm[langchain]'``, docs/integrations.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from kvcomm.errors import InvalidInput
from kvcomm.hf.engine import Engine
from kvcomm.hf.reply import Reply
from kvcomm.hf.streaming import stream_chat
from kvcomm.integrations.calls import check_calls_can_be_read, read_calls


class ChatKVComm(BaseChatModel):
    """Answers for LangChain through Engine.chat; chat models on one engine reuse each other's KV.

    Attributes:
        engine: shared by as many chat models as there are agents.
        agent: the agent whose conversation this is; what is learned is learned for its places. One chat model for each
            agent.
        options: further arguments of Engine.chat for every call: ``max_new_tokens``, ``policy``, ``do_sample``, ...

    A message's ``usage_metadata`` has the cached tokens as ``cache_read``; its ``response_metadata["kvcomm"]`` splits
    them into exact and approximate, and has the time to the first token in seconds and the plan as text.
    """

    engine: Engine = Field(repr=False, exclude=True)
    agent: str = "chat"
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "kvcomm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        model = self.engine.backend.spec.fingerprint.digest
        return {"model": model, "agent": self.agent, "options": str(sorted(self.options.items()))}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Raises:
            InvalidInput: a choice other than "auto", which nothing here enforces, or a chat template that writes calls
                in a form that is not read (kvcomm.integrations.calls).
        """
        if tool_choice not in (None, "auto"):
            raise InvalidInput(f"tool_choice is {tool_choice!r}; nothing makes the model call a tool, leave it out")
        check_calls_can_be_read(self.engine, self.options.get("template") or {})
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        reply = self.engine.chat(_talk(messages), **self._options(stop, kwargs))
        return _result(reply, stop, bool(kwargs.get("tools")))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        reply = await self.engine.achat(_talk(messages), **self._options(stop, kwargs))
        return _result(reply, stop, bool(kwargs.get("tools")))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        if stop or kwargs.get("tools"):  # what must be taken out of the text is known at its end
            whole = self._generate(messages, stop, run_manager, **kwargs).generations[0].message
            yield ChatGenerationChunk(message=AIMessageChunk(**whole.model_dump(exclude={"type"})))
            return
        pieces = stream_chat(self.engine, _talk(messages), **self._options(stop, kwargs))
        while True:
            try:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=next(pieces)))
            except StopIteration as ended:
                yield ChatGenerationChunk(message=AIMessageChunk(content="", **_metadata(ended.value)))
                return
            if run_manager is not None:
                run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
            yield chunk

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Options for Engine.chat: the call's before the model's."""
        return {"name": self.agent, **self.options, **kwargs, **({"stop_strings": stop} if stop else {})}


def _talk(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: of calls the arguments as objects."""
    talk = convert_to_openai_messages(messages, text_format="string")
    for message in talk:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return talk


def _result(reply: Reply, stop: list[str] | None, tools: bool) -> ChatResult:
    text = reply.text
    for each in stop or []:
        text = text.partition(each)[0]
    message = AIMessage(content=text, **_metadata(reply))
    if tools:
        found = read_calls(text)
        message = AIMessage(
            content=found.text,
            tool_calls=[ToolCall(name=name, args=dict(args), id=f"call_{uuid4().hex}") for name, args in found.calls],
            invalid_tool_calls=[
                InvalidToolCall(type="invalid_tool_call", name=None, args=written, id=None, error=error)
                for written, error in found.unread
            ],
            **_metadata(reply),
        )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _metadata(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    counted = UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
    own = {"exact": usage.exact, "approximate": usage.approximate, "ttft_s": reply.ttft_s, "plan": str(reply.plan)}
    return {"usage_metadata": counted, "response_metadata": {"kvcomm": own}}
