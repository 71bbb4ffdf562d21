"""The tasks by name. A new task is one file in this folder and one line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eval.tasks.base import Problem, Task
from eval.tasks.documents import Documents
from eval.tasks.humaneval import HumanEval
from eval.tasks.jsonl import Jsonl
from eval.tasks.maths import Maths
from eval.tasks.needle import Needle
from eval.tasks.tools import Tools
from kvcomm.errors import InvalidInput

TASKS: dict[str, Callable[[bool], Task]] = {
    "humaneval": HumanEval,
    "documents": lambda execute: Documents(),
    "tools": lambda execute: Tools(),
    "maths": lambda execute: Maths(),
    "needle": lambda execute: Needle(),
}

__all__ = ["TASKS", "Problem", "Task", "make_task"]


def make_task(name: str, execute: bool = False) -> Task:
    """The task of that name.

    Args:
        name: a key of TASKS, or the path of a user's own JSONL file, which ends in ``.jsonl`` (eval/tasks/jsonl.py).
        execute: whether answers may be run as programs to score them (in eval/sandbox/program.py).

    Raises:
        InvalidInput: there is no such task.
    """
    if name.endswith(".jsonl"):
        return Jsonl(Path(name))
    if name not in TASKS:
        raise InvalidInput(
            f"there is no task {name!r}; choose one of {', '.join(sorted(TASKS))}, or give the path of a .jsonl file"
        )
    return TASKS[name](execute)
