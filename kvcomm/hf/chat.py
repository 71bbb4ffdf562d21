"""Conversations through the tokenizer's own chat template, cut into segments: Engine.chat.

The prompt's ids are those of ``apply_chat_template(tokenize=True)``, to the token; segments are places in them. A
text's segment is made of the tokens that lie in it whole: one that reaches over its edge stays with the fixed text
beside it, so that the same text gives the same segment whatever stands around it. The answer that an engine generated
is a segment of the next turn's prompt, with the KV of its decode, if template and tokenizer give back the ids
generated.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.hf.arguments import check_generate_arguments, stop_tokens
from kvcomm.hf.chat_text import (
    Message,
    Renderer,
    Span,
    document_spans,
    message_spans,
    rewritten_from,
    tool_spans,
    without_error,
)
from kvcomm.hf.reply import Reply
from kvcomm.hf.template import check_label, check_name
from kvcomm.reuse.policy import Policy
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.tool_text import sorted_tool, tool_name
from kvcomm.types import Segment

if TYPE_CHECKING:
    from kvcomm.hf.engine import Engine

log = logging.getLogger(__name__)

_FIXED = {
    "conversation", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation", "max_length",
}  # fmt: skip

Tool = Mapping[str, Any] | Callable[..., Any]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a prompt.

    Attributes:
        prompt: its parts, labelled ``name/role``, ``name/definition`` (a tool's), ``name/document`` and, for the
            template's own text, ``name/#`` with what stands behind it.
        rewritten: index of the first token of an earlier turn that the template wrote otherwise than when it was
            answered, or None.
    """

    prompt: Prompt
    rewritten: int | None = None


def chat(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    documents: Sequence[Mapping[str, Any]] | None = None,
    name: str = "chat",
    canonical: bool = True,
    template: Mapping[str, Any] | None = None,
    max_new_tokens: int | None = None,
    policy: Policy | None = None,
    **generate_kwargs: Any,
) -> Reply:
    """Answer a conversation.

    Args:
        messages: as apply_chat_template takes them, each a dict of role and content.
        tools: JSON schemas, or functions with type hints and a docstring.
        documents: for templates that show some.
        name: the agent whose conversation this is; what is learned is learned for its places.
        canonical: give tools sorted by name, and their keys in one order, so that neither order matters; it changes
            what the model sees.
        template: further arguments of apply_chat_template, such as ``{"enable_thinking": False}``.
        max_new_tokens, policy, generate_kwargs: see Engine.generate.

    Returns:
        the reply; ``plan.why`` says when the template has rewritten earlier turns.

    Raises:
        InvalidInput: there is no chat template, it refuses the conversation or does not show the tools or documents,
            or the tokenizer cannot say where tokens stand; otherwise as Engine.generate.
    """
    started = time.perf_counter()
    check_generate_arguments(generate_kwargs)
    made = chat_prompt(
        engine.tokenizer,
        messages,
        tools,
        documents=documents,
        name=name,
        canonical=canonical,
        template=template,
        ends=stop_tokens(engine.model, engine.tokenizer, generate_kwargs),
    )
    reply = engine.generate(
        made.prompt,
        label=f"{name}/reply",
        max_new_tokens=max_new_tokens,
        policy=policy,
        started=started,
        **generate_kwargs,
    )
    if made.rewritten is None:
        return reply
    said = f"the chat template has rewritten earlier turns from token {made.rewritten} on"
    log.info("%s: %s", name, said)
    return replace(reply, plan=replace(reply.plan, why=f"{reply.plan.why}; {said}"))


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    *,
    documents: Sequence[Mapping[str, Any]] | None = None,
    name: str = "chat",
    canonical: bool = True,
    template: Mapping[str, Any] | None = None,
    ends: frozenset[int] = frozenset(),
) -> ChatPrompt:
    """A conversation's prompt; arguments and errors as chat.

    Args:
        ends: ids that end an answer.
    """
    check_name(name)
    need(canonical, bool, "canonical", "give True or False")
    if documents is not None:
        need_all(documents, Mapping, "documents", "pass a list of dicts, or nothing")
    _check(tokenizer, messages)
    _check_template(template if template is not None else {})
    schemas = _schemas(tools, canonical)
    renderer = Renderer(tokenizer, schemas, list(documents or []) or None, template or {})
    text = renderer.text(messages)
    for given, what, without in (
        (renderer.tools, "tools", replace(renderer, tools=None)),
        (renderer.documents, "documents", replace(renderer, documents=None)),
    ):
        if given and without_error(without, messages) == text:
            raise InvalidInput(
                f"the chat template of {tokenizer.name_or_path!r} does not show {what}: the model would not see them; "
                "put them into a message, or pass a template that does with template={'chat_template': ...}"
            )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidInput("the conversation contains half a surrogate pair; pass text that encodes to UTF-8")
    token_ids, offsets = renderer.tokens(messages)
    spans = message_spans(renderer, messages, text)
    spans += tool_spans(text, schemas or []) + document_spans(text, renderer.documents or [])
    prompt = Prompt(_parts(token_ids, offsets, spans, name, ends), grows=True)
    changed = rewritten_from(renderer, messages, text)
    return ChatPrompt(prompt, None if changed is None else bisect_right([stop for _, stop in offsets], changed))


def shows_tools(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], template: Mapping[str, Any] | None = None
) -> bool:
    """Whether the chat template shows tools at all; ``chat`` refuses them where it does not.

    Args:
        template: as in chat.

    Raises:
        InvalidInput: there is no chat template, or a tool has no schema.
    """
    asked = [{"role": "user", "content": "?"}]
    _check(tokenizer, asked)
    renderer = Renderer(tokenizer, _schemas(tools, canonical=False), None, template or {})
    return without_error(renderer, asked) != without_error(replace(renderer, tools=None), asked)


def _check(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidInput(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; set tokenizer.chat_template, or write "
            "the prompt as an agent's template (engine.agent)"
        )
    if not tokenizer.is_fast:
        raise InvalidInput(
            f"{type(tokenizer).__name__} cannot say which characters a token stands for; load a fast tokenizer, or "
            "write the prompt as an agent's template (engine.agent)"
        )
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not listed or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidInput(
            f"messages are {type(messages).__name__}; pass one dict of role and content or more, in a list"
        )
    for message in messages:
        if "role" not in message:
            raise InvalidInput(f"a message has {sorted(map(str, message))} and no role; give it one")
        check_label(message["role"])
        content = message.get("content")
        need(content, (str, list, tuple, type(None)), "a message's content", "pass text, or a list of dicts")
        if isinstance(content, list | tuple):
            need_all(content, Mapping, "a message's content", "pass text, or a list of dicts")


def _check_template(arguments: Mapping[str, Any]) -> None:
    """Refuse what would change how the prompt is made, and not what the template is given."""
    if not isinstance(arguments, Mapping):
        raise InvalidInput(f"template is {arguments!r}; pass a dict of arguments for the chat template")
    fixed = sorted(_FIXED & arguments.keys())
    if fixed:
        raise InvalidInput(f"template sets {', '.join(fixed)}, which chat itself decides; leave it out")


def _schemas(tools: Sequence[Tool] | None, canonical: bool) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    need(tools, (list, tuple), "tools", "pass a list of JSON schemas or functions, or nothing")
    if not tools:
        return None
    schemas: list[Mapping[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise InvalidInput(f"a tool is {type(tool).__name__}; pass its JSON schema as a dict, or a function")
        try:
            schemas.append(dict(tool) if isinstance(tool, Mapping) else get_json_schema(tool))
        except (ValueError, TypeError, DocstringParsingException, TypeHintParsingException) as error:
            raise InvalidInput(f"no JSON schema can be made of the function {tool!r}: {error}") from error
    return [sorted_tool(tool) for tool in sorted(schemas, key=tool_name)] if canonical else schemas


def _parts(
    token_ids: tuple[int, ...], offsets: list[tuple[int, int]], spans: list[Span], name: str, ends: frozenset[int]
) -> tuple[Part, ...]:
    """The prompt's tokens in parts: those that lie in a span whole, and what stands between."""
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    parts: list[Part] = []
    at = 0
    for span in sorted(spans, key=lambda span: span.start):
        first = bisect_left(starts, span.start)
        limit = len(token_ids) if span.limit is None else bisect_left(starts, span.limit)
        end = None if span.limit is None else next((n for n in range(first, limit) if token_ids[n] in ends), None)
        if end is None and span.stop is not None:
            end = bisect_right(stops, span.stop)
        if end is None or first < at or first >= end:
            continue
        if at < first:
            parts.append(Part(Segment(token_ids[at:first]), f"{name}/#{span.kind}"))
        parts.append(Part(Segment(token_ids[first:end]), f"{name}/{span.kind}"))
        at = end
    if at < len(token_ids):
        parts.append(Part(Segment(token_ids[at:]), f"{name}/#assistant"))
    return tuple(parts)
