"""Prompts as people write them: an agent's fixed texts and slots, rendered through the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.hf.texts import PlainTexts
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import Segment

RESERVED = frozenset({"self", "answer", "max_new_tokens", "policy", "options"})
"""Names of other arguments in the calls that take slots by name."""

_MARK = "\u27e6kvcomm-slot-{}\u27e7"

MAX_NAME = 128


@dataclass(frozen=True)
class System:
    """The system message; at most one, and first."""

    text: str

    def __post_init__(self) -> None:
        need(self.text, str, "a System's text", "pass text")


@dataclass(frozen=True)
class Slot:
    """A named place in a template that is filled at each call."""

    name: str

    def __post_init__(self) -> None:
        need(self.name, str, "a Slot's name", "pass an identifier as text")


class HasSegment(Protocol):
    """Whatever carries a segment of its own, such as another agent's reply."""

    @property
    def segment(self) -> Segment: ...


def check_name(name: str) -> None:
    """Raise InvalidInput for a name that cannot be part of a label."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or "/" in name or not name.isprintable():
        raise InvalidInput(
            f"agent name {str(name)[:MAX_NAME]!r} must be 1 to {MAX_NAME} printable characters without '/'"
        )


def check_label(label: str) -> None:
    """Raise InvalidInput for what cannot be the label of a place: text that encodes to UTF-8, or empty."""
    if not isinstance(label, str) or any("\ud800" <= character <= "\udfff" for character in label):
        raise InvalidInput(f"label {label!r} of type {type(label).__name__}: pass a str that encodes to UTF-8")


TemplatePart = System | Slot | str
SlotValue = str | Segment | HasSegment


class Template:
    """An agent's prompt: fixed segments, each with its slot behind it, tokenised once.

    Fixed texts are tokenised apart from what fills the slots, so that a segment's ids never depend on its neighbours.
    A text that a tokenizer would have merged across such a boundary is therefore cut there, in dense and reused runs
    alike. Text that fills a slot cannot introduce control tokens: ``<|im_end|>`` in it is read as plain characters.

    Args:
        name: the agent's name, part of every label.
        parts: texts and slots in order, System first if present. Consecutive texts are joined.

    Raises:
        InvalidInput: no parts, or others than texts and slots, a System that is not first, a slot named twice or not
            an identifier.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[TemplatePart],
        tokenizer: PreTrainedTokenizerBase,
        plain: PlainTexts | None = None,
    ) -> None:
        check_name(name)
        need_all(parts, (System, Slot, str), f"parts of agent {name!r}", "pass a list of System, Slot and text")
        self.name = name
        self._tokenizer = tokenizer
        self._plain = plain if plain is not None else PlainTexts(tokenizer)
        self.slots = tuple(part.name for part in parts if isinstance(part, Slot))
        self._check(name, parts)
        marks = [_MARK.format(n) for n in range(len(self.slots))]
        texts = [part.text if isinstance(part, System) else part for part in parts if not isinstance(part, Slot)]
        if any(mark in text for text in texts for mark in marks):
            raise InvalidInput("a fixed text contains kvcomm's own slot mark; reword it")
        self.fixed = self._render(parts, marks)

    def fill(self, values: Mapping[str, SlotValue]) -> Prompt:
        """The prompt with each slot filled.

        Raises:
            InvalidInput: a slot is not filled, is unknown, or has a value of another type.
        """
        missing = [slot for slot in self.slots if slot not in values]
        unknown = [name for name in values if name not in self.slots]
        if missing or unknown:
            raise InvalidInput(
                f"agent {self.name!r} has slots {list(self.slots)}; not filled: {missing}, unknown: {unknown}. "
                "Pass each slot once, by name; arguments of model.generate go in options={...}"
            )
        fixed = [Part(segment, f"{self.name}/#{n}") for n, segment in enumerate(self.fixed)]
        filled = [Part(self.segment(slot, values[slot]), f"{self.name}/{slot}") for slot in self.slots]
        parts = [fixed[0]]
        for text, slot in zip(fixed[1:], filled, strict=True):
            parts += [slot, text]
        return Prompt(tuple(part for part in parts if len(part.segment) or part in filled))

    def segment(self, slot: str, value: SlotValue) -> Segment:
        """The segment that ``value`` stands for in ``slot``.

        Raises:
            InvalidInput: the value is no text, segment or reply.
        """
        if isinstance(value, Segment):
            return value
        if isinstance(value, str):
            return self.text_segment(value)
        segment = getattr(value, "segment", None)
        if isinstance(segment, Segment):
            return segment
        raise InvalidInput(
            f"slot {slot!r} of agent {self.name!r} got {type(value).__name__}; pass str, Segment or a reply"
        )

    def text_segment(self, text: str) -> Segment:
        """A text's segment, control tokens in it read as plain characters.

        Raises:
            InvalidInput: the text is not encodable, or contains a control token of a single character.
        """
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidInput("a slot's text contains half a surrogate pair; pass text that encodes to UTF-8")
        ids: list[int] = []
        for piece in self._without_added(text):
            ids += self._plain(piece)
        return Segment(tuple(ids))

    def _without_added(self, text: str) -> list[str]:
        """``text`` cut within each token that was added to the vocabulary without being marked special (``<think>``).

        ``split_special_tokens`` splits those that are marked.
        """
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values() if not token.special]
        if not added:
            return [text]
        pattern = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
        pieces = []
        while (found := pattern.search(text)) is not None:
            if len(found.group()) == 1:
                raise InvalidInput(f"a slot's text contains the control token {found.group()!r}; leave it out")
            pieces.append(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return [*pieces, text]

    def _check(self, name: str, parts: Sequence[TemplatePart]) -> None:
        if not parts:
            raise InvalidInput(f"agent {name!r} has no parts; give texts and slots")
        if any(isinstance(part, System) for part in parts[1:]):
            raise InvalidInput(f"agent {name!r}: System must come first and once")
        doubled = sorted({slot for slot in self.slots if self.slots.count(slot) > 1 or not slot.isidentifier()})
        if doubled:
            raise InvalidInput(f"agent {name!r}: slots {doubled} are named twice or are not identifiers; rename them")
        taken = sorted(RESERVED.intersection(self.slots))
        if taken:
            raise InvalidInput(f"agent {name!r}: slots {taken} have names of arguments of its calls; rename them")

    def _render(self, parts: Sequence[TemplatePart], marks: list[str]) -> tuple[Segment, ...]:
        """The fixed segments: one before each slot and one after the last, possibly empty."""
        remaining = iter(marks)
        body = "".join(
            part if isinstance(part, str) else next(remaining) for part in parts if not isinstance(part, System)
        )
        system = parts[0].text if isinstance(parts[0], System) else None
        pieces = _cut(self._chat(system, body), marks)
        fixed = _cut(body, marks)
        kept = (
            pieces is not None and fixed is not None and all(a.strip() in b for a, b in zip(fixed, pieces, strict=True))
        )
        if pieces is None or not kept or (system or "").strip() not in pieces[0]:
            raise InvalidInput(
                f"the chat template of {self._tokenizer.name_or_path!r} drops, repeats, moves or shortens what it is "
                f"given (the system text or the texts and slots of agent {self.name!r}); use another template"
            )
        return tuple(
            Segment(tuple(self._begin(n) + self._tokenizer(piece, add_special_tokens=False)["input_ids"]))
            for n, piece in enumerate(pieces)
        )

    def _chat(self, system: str | None, body: str) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            return body if system is None else f"{system}\n\n{body}"
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": body})
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            what = "a system message" if system is not None else "these texts"
            raise InvalidInput(f"the chat template refuses {what} of agent {self.name!r}: {error}") from error

    def _begin(self, index: int) -> list[int]:
        """The tokenizer's own beginning-of-text ids, in front of the first segment where no chat template puts them."""
        if index or getattr(self._tokenizer, "chat_template", None) is not None:
            return []
        plain = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self._tokenizer("a")["input_ids"]
        starts = (n for n in range(len(full) - len(plain) + 1) if full[n : n + len(plain)] == plain)
        return list(full[: next(starts, 0)])  # some tokenizers put an end behind the text as well


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """``text`` cut at its marks, or None where they do not stand in it once each and in order."""
    if any(text.count(mark) != 1 for mark in marks):
        return None
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, text]
