"""Problems made into cases of a wanted prompt length: a task, documents of real text, and who hears whom."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eval.cases.case_text import HEADING_TOKENS, MIN_OWN_TOKENS, MIN_TOKENS, Messages, Tokens, fillers, fitted
from eval.tasks.base import Problem
from eval.topologies import Node
from kvcomm import Segment
from kvcomm.errors import InvalidInput
from kvcomm.hf.template import Template

DOCUMENT_TOKENS = 256
_SHORTFALL = 0.05
"""Share of the prompt length that may be missing before a filler document is added."""
_TOLERANCE = 0.15
"""Share of the prompt length by which a prompt may differ from it."""


@dataclass(frozen=True)
class Case:
    """One problem ready to run.

    Attributes:
        slots: documents and task by slot name; the heard messages are added as they are written.
        references: for each agent a text to stand for its message where none is generated.
    """

    problem: Problem
    slots: dict[str, Segment]
    references: dict[str, Segment]


@dataclass(frozen=True)
class Workload:
    """Cases to learn from and cases to measure; they share no document, task or message."""

    nodes: tuple[Node, ...]
    fill: tuple[Case, ...]
    measured: tuple[Case, ...]
    answer_tokens: int


def build(
    problems: Sequence[Problem],
    topology: Callable[[int, int], tuple[Node, ...]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    agents: int,
    prompt_tokens: int,
    answer_tokens: int,
    measured: int,
    fill: int,
    seed: int,
) -> Workload:
    """Choose problems and cut documents so that the last agent's prompt has about ``prompt_tokens`` tokens.

    The first documents of a case are the problem's own. All cases have the same number of slots for them: the median
    number of documents that the chosen problems have, or as many of median length as the prompt has room for, at least
    one. The longest are cut at their end; a problem with more documents than slots loses the last ones, and one with
    fewer gets filler in their place. The document that answers (``Problem.answered_in``) is never lost, and is cut
    only where it alone does not fit.

    What room is left goes to filler: worked examples (other problems of the task with their answers) and passages of
    what Python itself carries, in turn, each about ``DOCUMENT_TOKENS`` tokens. No filler repeats a sentence of any
    case's own documents.

    Fill cases have no document, nor the beginning of one, in common with measured ones, no task, and no text that
    stands for a message; problems that do are passed over, as are those whose task alone does not fit.

    Raises:
        InvalidInput: too few problems, or a prompt length that the fixed texts alone exceed, or that a problem's
            documents cannot be brought to.
    """
    if measured < 1 or fill < 0 or measured + fill > len(problems):
        raise InvalidInput(
            f"{measured} measured and {fill} fill problems were asked for; the task has {len(problems)}, and at least "
            "1 must be measured"
        )
    text = Tokens(tokenizer)

    def taken(documents: int) -> int:
        """Tokens of the last prompt that are not its documents or task."""
        last = topology(agents, documents)[-1]
        fixed = sum(len(s) for s in Template(last.name, last.template(), tokenizer).fixed)
        return fixed + answer_tokens * len(last.hears)

    room = prompt_tokens - taken(0)  # for documents and the task
    shuffled = random.Random(seed).sample(list(problems), len(problems))
    chosen = _choose(shuffled, text, prompt_tokens, room, measured, fill)
    tasks = [text.segment(problem.task_text) for problem in chosen.cases]
    heading, rooms = HEADING_TOKENS, [room - len(task) for task in tasks]
    own, filler = _slots(chosen.cases, rooms, text, prompt_tokens, heading)
    headings = taken(own + filler) - taken(0)
    if abs(headings - heading * (own + filler)) > _SHORTFALL * prompt_tokens:  # many documents: what each takes counts
        heading = math.ceil(headings / (own + filler))
        own, filler = _slots(chosen.cases, rooms, text, prompt_tokens, heading)
    nodes, others = topology(agents, own + filler), taken(own + filler)
    source = fillers(chosen.others, chosen.cases, seed)
    messages = Messages(text, chosen.others, answer_tokens)
    built = []
    for number, (problem, task) in enumerate(zip(chosen.cases, tasks, strict=True)):
        left = max(room - len(task), 0)
        missing = own + filler - min(own, len(problem.documents))
        documents = fitted(problem, text, own, left - heading * (own + filler) - MIN_TOKENS * missing)
        left -= sum(len(document) + heading for document in documents)
        for n in range(missing):
            documents.append(text.joined(source[n % 2], max(left // missing - heading, MIN_TOKENS)))
        slots = {"task": task} | {f"document_{n + 1}": document for n, document in enumerate(documents)}
        _check_length(problem, others + sum(map(len, slots.values())), prompt_tokens)
        built.append(Case(problem, slots, messages.of(nodes, problem, measured=number < measured)))
    return Workload(nodes, tuple(built[measured:]), tuple(built[:measured]), answer_tokens)


@dataclass(frozen=True)
class _Chosen:
    """Cases, the measured ones first, and the problems that are left for examples."""

    cases: list[Problem]
    others: list[Problem]


def _choose(
    shuffled: Sequence[Problem], text: Tokens, prompt_tokens: int, room: int, measured: int, fill: int
) -> _Chosen:
    """The first problems that fit; those to learn from share no text with those to measure."""
    document = MIN_OWN_TOKENS + HEADING_TOKENS if any(problem.documents for problem in shuffled) else 0
    needed = {problem.id: len(text.segment(problem.task_text)) + document for problem in shuffled}
    least = min(needed.values())
    if least > room:
        raise InvalidInput(
            f"{prompt_tokens} prompt tokens are too few: fixed texts, task and messages take at least "
            f"{prompt_tokens - room + least}; ask for more"
        )
    cases: list[Problem] = []
    passed: list[Problem] = []
    seen: set[object] = set()
    for problem in shuffled:
        if len(cases) == measured + fill or needed[problem.id] > room:
            passed.append(problem)
            continue
        mine: set[object] = {problem.task_text, *map(text.beginning, problem.documents)}
        if len(cases) < measured:
            seen |= mine
        elif mine & seen:
            passed.append(problem)
            continue
        cases.append(problem)
    if len(cases) < measured + fill:
        raise InvalidInput(
            f"{measured} measured and {fill} fill problems were asked for; only {len(cases)} fit into {prompt_tokens} "
            "tokens and share no text between measured and fill; ask for fewer, or for longer prompts"
        )
    asked = {problem.task_text for problem in cases}
    return _Chosen(cases, [problem for problem in passed if problem.task_text not in asked])


def _check_length(problem: Problem, length: int, prompt_tokens: int) -> None:
    if abs(length - prompt_tokens) > _TOLERANCE * prompt_tokens:
        raise InvalidInput(
            f"problem {problem.id!r} makes a prompt of {length} tokens where {prompt_tokens} were asked for, more than "
            f"{_TOLERANCE:.0%} off; ask for another length, or give it other documents"
        )


def _slots(
    cases: Sequence[Problem], rooms: Sequence[int], text: Tokens, prompt_tokens: int, heading: int
) -> tuple[int, int]:
    """How many slots for problems' own documents, and how many more for filler; ``rooms`` is without each task."""
    budget = sorted(rooms)[(len(rooms) - 1) // 2]
    lengths = sorted(len(text.segment(document)) for problem in cases for document in problem.documents)
    if not lengths:
        return 0, max(round(budget / DOCUMENT_TOKENS), 0)
    each = lengths[len(lengths) // 2] + heading
    wanted = sorted(len(problem.documents) for problem in cases)[len(cases) // 2]
    own = min(wanted, round(budget / each))
    for problem, room in zip(cases, rooms, strict=True):
        while own > 1 and _least(problem, text, own, heading) > room:
            own -= 1
    own = max(own, 1)
    filler = max(round((budget - own * each) / DOCUMENT_TOKENS), 0)
    for problem, room in zip(cases, rooms, strict=True):
        short = room - heading * own - sum(len(document) for document in fitted(problem, text, own, room))
        if short > _SHORTFALL * prompt_tokens and len(problem.documents) >= own:
            filler = max(filler, 1)
    spare = min(room - _least(problem, text, own, heading) for problem, room in zip(cases, rooms, strict=True))
    return own, min(filler, spare // (MIN_TOKENS + heading))


def _least(problem: Problem, text: Tokens, own: int, heading: int) -> int:
    """Tokens that ``own`` slots take at least: documents that are short as they are, longer ones and filler cut."""
    kept = fitted(problem, text, own, 0)
    return sum(map(len, kept)) + MIN_TOKENS * (own - len(kept)) + heading * own
