"""What a task is: problems made of text, and for some tasks a score of an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One problem, as text that agents are given.

    Attributes:
        id: name within the task.
        task_text: what is asked.
        documents: texts that belong to the problem, each a segment of its own; may be empty.
        reference: the right answer, or text as good as one; empty where none is known.
        worked: the answer written out as an agent might; empty where ``reference`` is that already.
        answered_in: index of the document without which the problem cannot be answered, if there is one.
    """

    id: str
    task_text: str
    documents: tuple[str, ...]
    reference: str
    worked: str = ""
    answered_in: int | None = None

    @property
    def message(self) -> str:
        """A text that can stand for an agent's answer."""
        return self.worked or self.reference


class Task(Protocol):
    """A source of problems."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        ...

    def problems(self) -> list[Problem]:
        """All problems, always in the same order.

        Raises:
            FetchError: the data could not be fetched.
        """
        ...

    def score(self, problem: Problem, answer: str) -> float | None:
        """Score of ``answer``, 0 to 1; ``None`` where the task has none or scoring was not asked for."""
        ...


_PART_BEFORE = r"(?<!\d[.,])(?<!(?<![\w.])\.)(?<!(?<![\w)])[-+−–])(?<!(?<![\w)])[-+−–][$€£¥])"
"""Before a number: no digits with a point or comma, no bare point, no sign, also where a currency stands between."""
_PART_BEHIND = r"(?![.,]\d)"


def mentions(answer: str, wanted: str) -> bool:
    """Whether ``wanted`` stands in ``answer`` as whole words; case and the width of white space do not matter.

    A number at its beginning or end is a whole one: no part of a longer number, and of no sign that is not wanted.
    """
    words = r"\s+".join(re.escape(word) for word in wanted.split())
    before = _PART_BEFORE if re.match(r"\s*[$€£¥]?\d", wanted) else ""
    behind = _PART_BEHIND if re.search(r"\d\s*$", wanted) else ""
    return bool(words) and re.search(rf"(?<!\w){before}{words}{behind}(?!\w)", answer, re.IGNORECASE) is not None
