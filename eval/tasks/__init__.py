"""The tasks by name. A new task is one file in this folder and one line here."""

from __future__ import annotations

from collections.abc import Callable

from eval.tasks.base import Problem, Task
from eval.tasks.humaneval import HumanEval
from kvcomm.errors import InvalidInput

TASKS: dict[str, Callable[[bool], Task]] = {
    "humaneval": HumanEval,
}

__all__ = ["TASKS", "Problem", "Task", "make_task"]


def make_task(name: str, execute: bool = False) -> Task:
    """The task of that name.

    Args:
        name: a key of TASKS.
        execute: whether answers may be run as programs to score them (in eval/sandbox.py).

    Raises:
        InvalidInput: there is no such task.
    """
    if name not in TASKS:
        raise InvalidInput(f"there is no task {name!r}; choose one of {', '.join(sorted(TASKS))}")
    return TASKS[name](execute)
