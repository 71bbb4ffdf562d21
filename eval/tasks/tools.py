"""Which tool to call: multiple-function problems of BFCL v4 (https://gorilla.cs.berkeley.edu/leaderboard.html)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.files.fetch import WheelFile, wheel_file
from eval.tasks.base import Problem
from kvcomm.tool_text import canonical_json, canonical_tool, tool_name

MAX_TOOLS = 6
MAX_TOOL_CHARACTERS = 1_200


def _member(name: str, sha256: str, answers: bool = False) -> WheelFile:
    folder = "bfcl_eval/data/possible_answer" if answers else "bfcl_eval/data"
    saved_as = f"answers-{name}" if answers else ""
    return WheelFile("bfcl-eval", "2026.3.23", f"{folder}/{name}", sha256, saved_as)


DATA: tuple[tuple[WheelFile, WheelFile], ...] = (
    (
        _member("BFCL_v4_multiple.json", "aef168155ebd74b7ac2401198b201343bc7d16d7a3d7e0d4e6d8ee82c6969b2a"),
        _member("BFCL_v4_multiple.json", "244e00ce9395df948bcafc7bee64e8f9c87ef70887587d83cae45b13699f3047", True),
    ),
    (
        _member("BFCL_v4_live_multiple.json", "fd8ccfad4d911420d0e3341dbe2fff77d1d341da934248b9bb2bda24ab3a10c8"),
        _member("BFCL_v4_live_multiple.json", "97e90d59c5bd76c55a2920ce93e5566e9046307d3f558578f085f9d3a56c3084", True),
    ),
)
"""Questions and answers, JSON objects a line each."""
_REQUEST = "Which of the tools in the reference material answers this request? Give its name and its arguments."


@dataclass(frozen=True)
class Tools:
    """Problems with 3 to MAX_TOOLS tools, of which one is right; no two problems have a tool's name in common."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "tools"

    @cached_property
    def _problems(self) -> list[Problem]:
        found: list[Problem] = []
        used: set[str] = set()
        for questions, answers in DATA:
            right = {record["id"]: record["ground_truth"] for record in _lines(wheel_file(answers))}
            for record in _lines(wheel_file(questions)):
                problem = _problem(record, right[record["id"]])
                names = {tool_name(tool) for tool in record["function"]}
                if problem is not None and not names & used:
                    used |= names
                    found.append(problem)
        return found

    def problems(self) -> list[Problem]:
        """In the published order; a document is a tool's canonical text, ``reference`` the right tool's name."""
        return list(self._problems)

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the answer names the right tool, and no other of the problem's tools before it."""
        named = {}
        for document in problem.documents:
            name = tool_name(json.loads(document))
            found = re.search(_pattern(name), answer)
            if found:
                named[name] = found.start()
        return float(bool(named) and min(named, key=named.__getitem__) == problem.reference)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _problem(record: dict[str, Any], truth: list[dict[str, Any]]) -> Problem | None:
    """The record as a problem; None where tools are too few, too many, too long or ambiguous, or messages several."""
    tools = {tool_name(tool): tool for tool in record["function"]}
    documents = tuple(canonical_tool(tool) for tool in tools.values())
    messages = record["question"][0]
    name, arguments = next(iter(truth[0].items()))
    if (
        not 3 <= len(tools) <= MAX_TOOLS
        or len(tools) != len(record["function"])
        or max(map(len, documents)) > MAX_TOOL_CHARACTERS
        or len(messages) != 1
        or name not in tools
    ):
        return None
    given = {key: values[0] for key, values in arguments.items() if values and values[0] != ""}
    worked = f"The request is met by {name}, called with {canonical_json(given)}."
    text = f"{messages[0]['content'].strip()}\n\n{_REQUEST}"
    return Problem(record["id"], text, documents, name, worked, list(tools).index(name))


def _pattern(name: str) -> str:
    """The name as a whole identifier; a dot may have become an underscore, as in APIs that allow no dots."""
    return rf"(?<![\w.]){re.escape(name).replace(re.escape('.'), '[._]')}(?!\w|\.\w)"
