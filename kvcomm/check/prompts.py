"""Prompts to compare on: texts that one agent reads first and another one later, and a question to the second.

A file has a JSON object a line: ``texts`` (1 to 8 strings), ``question``, ``kind``, a word by which results are
grouped, and perhaps ``first``: as many texts that the first agent reads instead. Those of ``texts`` that are not among
them are then new to the second, and the others stand behind something else than they did. What texts are of is up to
the user: his own documents, tool definitions and messages tell the most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvcomm.errors import InvalidInput

MOST_TEXTS = 8
MOST_BYTES = 1 << 26  # of a file


@dataclass(frozen=True)
class Example:
    """Texts and a question about them.

    Attributes:
        first: what the first agent reads, as many texts.
    """

    kind: str
    texts: tuple[str, ...]
    question: str
    first: tuple[str, ...]


def shipped() -> list[Example]:
    """The prompts that come with the package: short texts of several kinds."""
    return _parse(
        (resources.files("kvcomm.check") / "prompts.jsonl").read_text(encoding="utf-8").split("\n"), "shipped"
    )


def read(path: Path) -> list[Example]:
    """The prompts of a user's file.

    Raises:
        InvalidInput: it cannot be read or is too long, or a line is not as it must be; the message names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InvalidInput(f"{path} has more than {MOST_BYTES} bytes; give fewer prompts")
        lines = data.decode("utf-8").split("\n")  # no other line breaks: JSON strings may hold those
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from None
    return _parse(lines, str(path))


def _parse(lines: Iterable[str], where: str) -> list[Example]:
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            texts, question, kind = data["texts"], data["question"], data.get("kind", "text")
            first = data.get("first", texts)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f'{where}, line {number}: {error!r}; give {{"texts": [...], "question": "...", "kind": "..."}}'
            ) from None
        strings = isinstance(texts, list) and isinstance(first, list)
        strings = (
            strings
            and len(first) == len(texts)
            and all(isinstance(text, str) and text for text in [*texts, *first, question, kind])
        )
        if not strings or not 1 <= len(texts) <= MOST_TEXTS:
            raise InvalidInput(
                f"{where}, line {number}: give 1 to {MOST_TEXTS} texts, a question and a kind, none "
                "empty, and as many first, if any"
            )
        found.append(Example(kind, tuple(texts), question, tuple(first)))
    return found


def divided(examples: Sequence[Example], least: int = 4) -> tuple[list[Example], list[Example]]:
    """Prompts to learn offsets from, a third and at least ``least``, and those to measure; kinds in turn in both.

    Raises:
        InvalidInput: nothing is left to measure.
    """
    by_kind: dict[str, list[Example]] = {}
    for example in examples:
        by_kind.setdefault(example.kind, []).append(example)
    order = [
        kind[n] for n in range(max(map(len, by_kind.values()), default=0)) for kind in by_kind.values() if n < len(kind)
    ]
    count = max(len(order) // 3, least)
    if count >= len(order):
        raise InvalidInput(f"{len(order)} prompts are too few: {least} are learned from; give at least {least + 1}")
    return order[:count], order[count:]
