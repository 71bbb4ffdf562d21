"""A user's own task: a JSONL file, one question a line with the texts that it is asked about.

Fields of a line, no others:

| field | value |
|---|---|
| ``question`` | text, needed |
| ``segments`` | a list of texts, each a segment of its own; needed, may be empty |
| ``answer`` | text; a reply scores 1 if it contains it as whole words, and without it nothing is scored |
| ``worked`` | text: the answer written out, to stand for an agent's message |
| ``answered_in`` | number of the segment, from 0, that must be kept when segments have to go |
| ``id`` | text; the number of the line where it is not given |
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.files.reading import MAX_FILE_BYTES, read_file
from eval.tasks.base import Problem, mentions
from kvcomm.errors import InvalidInput

_FIELDS = ("id", "question", "segments", "answer", "worked", "answered_in")


@dataclass(frozen=True)
class Jsonl:
    """Fields: ``path``, the file."""

    path: Path

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @cached_property
    def _problems(self) -> list[Problem]:
        lines = read_file(self.path, "a JSONL file", MAX_FILE_BYTES).split(b"\n")
        found: dict[str, Problem] = {}
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{self.path}, line {number}"
                problem = _problem(_record(line, where), where, str(number))
                if problem.id in found:
                    raise InvalidInput(
                        f"{where}, field 'id': {problem.id!r} is taken by an earlier line; choose another"
                    )
                found[problem.id] = problem
        if not found:
            raise InvalidInput(f"{self.path} has no lines; give at least one with 'question' and 'segments'")
        return list(found.values())

    def problems(self) -> list[Problem]:
        """One a line, in the file's order.

        Raises:
            InvalidInput: the file cannot be read, or a line is not as described; the message names line and field.
        """
        return list(self._problems)

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the line's ``answer`` stands in the reply; ``None`` where the line has none."""
        return float(mentions(answer, problem.reference)) if problem.reference else None


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not JSON in UTF-8 ({error}); write one object a line") from None
    if not isinstance(record, dict):
        raise InvalidInput(f"{where}: a {type(record).__name__} where an object is wanted; write one object a line")
    unknown = [field for field in record if field not in _FIELDS]
    if unknown:
        raise InvalidInput(f"{where}, field {unknown[0]!r}: there is no such field; known are {', '.join(_FIELDS)}")
    return record


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"field {key!r} stands twice")
        record[key] = value
    return record


def _problem(record: dict[str, Any], where: str, number: str) -> Problem:
    segments = record.get("segments")
    if not isinstance(segments, list):
        raise InvalidInput(f"{where}, field 'segments': {_seen(record, 'segments')}; give a list of texts")
    documents = tuple(_text({f"segments[{n}]": text}, f"segments[{n}]", where) for n, text in enumerate(segments))
    question = _text(record, "question", where)
    answer = _text(record, "answer", where) if "answer" in record else ""
    worked = _text(record, "worked", where) if "worked" in record else f"{question}\n{answer}".strip()
    place = record.get("answered_in")
    number_of_one = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(documents)
    if "answered_in" in record and not number_of_one:
        raise InvalidInput(f"{where}, field 'answered_in': {place!r} must be a number of a segment, from 0")
    name = _text(record, "id", where) if "id" in record else number
    return Problem(name, question, documents, answer, worked, place)


def _text(record: dict[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{where}, field {field!r}: {_seen(record, field)}; give a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{where}, field {field!r}: half a surrogate pair is no text; write whole characters"
        ) from None
    return value


def _seen(record: dict[str, Any], field: str) -> str:
    if field not in record:
        return "is missing"
    value = record[field]
    empty = isinstance(value, str) and not value.strip()
    return "is empty" if empty else f"is of type {type(value).__name__}"
