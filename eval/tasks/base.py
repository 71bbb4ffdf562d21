"""What a task is: problems made of text, and for some tasks a score of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One problem, as text that agents are given.

    Attributes:
        id: name within the task.
        task_text: what is asked.
        documents: texts that belong to the problem, each a segment of its own; may be empty.
        reference: the right answer, or text as good as one.
    """

    id: str
    task_text: str
    documents: tuple[str, ...]
    reference: str


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
