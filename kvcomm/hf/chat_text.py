"""Where the pieces of a conversation stand in the text that a chat template makes of it.

Messages are rendered a second time with a mark at either end of each content. Where that text without its marks is the
text itself, the marks tell the places; a template that looks at contents (cuts them, counts them) gives another text,
and then each message is tried alone. A model's own answer begins where the template's generation prompt ends. Tools are
looked for as the JSON that templates write, documents as they are. What is not found stays with the fixed text around
it: places decide what reuse costs and never what the model is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcomm.errors import InvalidInput

Message = Mapping[str, Any]
Place = tuple[int | None, int]
"""Where a content begins and ends in the text; a template may have cut its beginning off."""
_MARK = re.compile("\ue0f0([0-9]+)([\ue0f1\ue0f2])")  # private use: open and close of a message by its index
_FORMS: tuple[dict[str, Any], ...] = tuple(
    {"indent": indent, "separators": separators, "ensure_ascii": False}
    for indent in (None, 4, 2)
    for separators in (None, (",", ":"))
)


@dataclass(frozen=True)
class Span:
    """A piece of the rendered text.

    Attributes:
        start, stop: its characters. An answer whose template writes no more than its beginning has no ``stop``.
        kind: a message's role, ``definition`` (of a tool) or ``document``: what its place is named by.
        limit: for an answer, where the next piece begins or the text ends: an end-of-turn token before it ends it.
    """

    start: int
    stop: int | None
    kind: str
    limit: int | None = None


@dataclass(frozen=True)
class Renderer:
    """A tokenizer's chat template with everything but the messages.

    Attributes:
        arguments: further ones for the template, such as ``{"enable_thinking": False}``.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    arguments: Mapping[str, Any]

    def text(self, messages: Sequence[Message], prompt: bool = True) -> str:
        """The conversation as text, with the template's generation prompt behind it or without.

        Raises:
            InvalidInput: the template refuses the conversation, or there is none.
        """
        return str(self._apply(messages, tokenize=False, add_generation_prompt=prompt))

    def tokens(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """The prompt's ids, and for each the characters of the text that it stands for.

        Raises:
            InvalidInput: as text.
        """
        found = self._apply(
            messages,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        return tuple(found["input_ids"]), list(found["offset_mapping"])

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        given = {"tools": self.tools, "documents": self.documents, **self.arguments, **how}
        try:
            return self.tokenizer.apply_chat_template([dict(message) for message in messages], **given)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses this conversation: {error}"
            ) from error


def message_spans(renderer: Renderer, messages: Sequence[Message], text: str) -> list[Span]:
    """Contents of messages and the model's own answers, in the order of the messages."""
    marks = _marks(renderer, messages, text)
    bare = without_error(renderer, messages, prompt=False)
    header = text[len(bare) :] if bare and text.startswith(bare) else ""
    spans: list[Span] = []
    at = 0
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            later = (start for n in range(index + 1, len(messages)) for start, _ in marks.get(n, []))
            limit = next((start for start in later if start is not None), len(text))
            answer = _answer(text, header, at, marks.get(index, []), limit)
            if answer is not None:
                spans.append(answer)
                at = max(answer.start, answer.stop or 0)
            continue
        for start, stop in marks.get(index, []):
            if start is not None:
                spans.append(Span(start, stop, str(message.get("role"))))
            at = stop
    return spans


def tool_spans(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The tools' JSON, whole or the function's alone, in one of the forms that templates write."""
    for inner in (False, True):
        for form in _FORMS:
            shown = [json.dumps(tool.get("function", tool) if inner else tool, **form) for tool in tools]
            spans = list(_found(text, shown, "definition"))
            if len(spans) == len(tools):
                return spans
    return []


def document_spans(text: str, documents: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The documents' longest texts, as they are or as in JSON."""
    longest = [
        max((v.strip() for v in document.values() if isinstance(v, str)), key=len, default="") for document in documents
    ]
    plain = list(_found(text, longest, "document"))
    return plain or list(_found(text, [json.dumps(t, ensure_ascii=False)[1:-1] for t in longest], "document"))


def rewritten_from(renderer: Renderer, messages: Sequence[Message], text: str) -> int | None:
    """The first character at which ``text`` is not what the last answer was generated behind, or None.

    Templates do that which drop the thinking of earlier turns, or move what depends on the last message.
    """
    answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant" and n]
    if not answers:
        return None
    before = without_error(renderer, messages[: answers[-1]])
    if text.startswith(before):
        return None
    return next((n for n, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), len(text))


def _found(text: str, wanted: Sequence[str], kind: str) -> Iterator[Span]:
    at = 0
    for each in wanted:
        start = text.find(each, at) if each else -1
        if start >= 0:
            at = start + len(each)
            yield Span(start, at, kind)


def _answer(text: str, header: str, at: int, places: Sequence[Place], limit: int) -> Span | None:
    """An assistant's turn: from the generation prompt's end, or from its content where the template writes another."""
    first, stop = (places[0][0], places[-1][1]) if places else (None, None)
    before = first if first is not None else stop if stop is not None else limit
    begins = text.find(header, at, before) if header else -1
    start = begins + len(header) if begins >= 0 else first
    return None if start is None else Span(start, stop, "assistant", limit)


def _marks(renderer: Renderer, messages: Sequence[Message], text: str) -> dict[int, list[Place]]:
    """Each message's places in ``text``, by its index."""
    for strip in (False, True):
        found = _places(without_error(renderer, [_marked(m, n, strip) for n, m in enumerate(messages)]), text)
        if found is not None:
            return found
    alone: dict[int, list[Place]] = {}
    for index in range(len(messages)):
        one = [_marked(message, n, True) if n == index else message for n, message in enumerate(messages)]
        alone |= _places(without_error(renderer, one), text) or {}
    return alone


def without_error(renderer: Renderer, messages: Sequence[Message], prompt: bool = True) -> str:
    """The text, or an empty one where the template refuses what nobody asked for."""
    try:
        return renderer.text(messages, prompt)
    except InvalidInput:
        return ""


def _marked(message: Message, index: int, strip: bool) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _between_marks(content, index, strip)}
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        parts = [
            {**part, "text": _between_marks(part["text"], index, strip)} if isinstance(part.get("text"), str) else part
            for part in content
        ]
        return {**message, "content": parts}
    return message


def _between_marks(text: str, index: int, strip: bool) -> str:
    """Marks at the text's ends, or with ``strip`` inside its white space, for templates that take that away."""
    inner = text.strip() if strip else text
    if not text.strip():
        return text
    before = text.index(inner)
    return f"{text[:before]}\ue0f0{index}\ue0f1{inner}\ue0f0{index}\ue0f2{text[before + len(inner) :]}"


def _places(marked: str, text: str) -> dict[int, list[Place]] | None:
    """Where the marks of ``marked`` stand in ``text``, or None where they are not all that the two differ by."""
    if _MARK.sub("", marked) != text:
        return None
    found: dict[int, list[Place]] = {}
    opened: tuple[int, int] | None = None
    removed = 0
    for mark in _MARK.finditer(marked):
        index, at = int(mark[1]), mark.start() - removed
        removed += len(mark[0])
        if mark[2] == "\ue0f1":
            opened = index, at
        else:
            start = opened[1] if opened is not None and opened[0] == index else None
            found.setdefault(index, []).append((start, at))
            opened = None
    return found
