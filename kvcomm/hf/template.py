"""Prompts as people write them: an agent's fixed texts and slots, rendered through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from kvcomm.errors import InvalidInput
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import Segment

RESERVED = frozenset({"self", "answer", "max_new_tokens", "policy", "options"})
"""Names of other arguments in the calls that take slots by name."""

_MARK = "\u27e6kvcomm-slot-{}\u27e7"


@dataclass(frozen=True)
class System:
    """The system message; at most one, and first."""

    text: str


@dataclass(frozen=True)
class Slot:
    """A named place in a template that is filled at each call."""

    name: str


class HasSegment(Protocol):
    """Whatever carries a segment of its own, such as another agent's reply."""

    @property
    def segment(self) -> Segment: ...


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
        InvalidInput: no parts, a System that is not first, a slot named twice or not an identifier.
    """

    def __init__(self, name: str, parts: Sequence[TemplatePart], tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = name
        self._tokenizer = tokenizer
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
        """A text's segment, control tokens in it read as plain characters."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return Segment(tuple(encoded["input_ids"]))

    def _check(self, name: str, parts: Sequence[TemplatePart]) -> None:
        if not name or "/" in name:
            raise InvalidInput(f"agent name {name!r} must not be empty or contain '/'")
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
        text = self._chat(system, body)
        pieces = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise InvalidInput(
                    f"the chat template of {self._tokenizer.name_or_path!r} drops or moves the user's text"
                )
            pieces.append(before)
        return tuple(
            Segment(tuple(self._begin(n) + self._tokenizer(piece, add_special_tokens=False)["input_ids"]))
            for n, piece in enumerate([*pieces, text])
        )

    def _chat(self, system: str | None, body: str) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            return body if system is None else f"{system}\n\n{body}"
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": body})
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _begin(self, index: int) -> list[int]:
        """The tokenizer's own beginning-of-text ids, in front of the first segment where no chat template puts them."""
        if index or getattr(self._tokenizer, "chat_template", None) is not None:
            return []
        plain = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self._tokenizer("a")["input_ids"]
        starts = (n for n in range(len(full) - len(plain) + 1) if full[n : n + len(plain)] == plain)
        return list(full[: next(starts, 0)])  # some tokenizers put an end behind the text as well
