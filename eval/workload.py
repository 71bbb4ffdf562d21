"""Problems made into cases of a wanted prompt length: a task, documents of real text, and who hears whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eval.tasks.base import Problem
from eval.tasks.prose import passages
from eval.topologies import Node
from kvcomm import Segment
from kvcomm.errors import InvalidInput
from kvcomm.hf.template import Template

DOCUMENT_TOKENS = 256


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

    Documents are worked examples (other problems of the task with their answers) and passages of Python's language
    reference in turn, each about ``DOCUMENT_TOKENS`` tokens.

    Raises:
        InvalidInput: too few problems, or a prompt length that the fixed texts alone exceed.
    """
    if measured < 1 or fill < 0 or measured + fill > len(problems):
        raise InvalidInput(
            f"{measured} measured and {fill} fill problems were asked for; the task has {len(problems)}, and at least "
            "1 must be measured"
        )
    chosen = random.Random(seed).sample(list(problems), len(problems))
    cases, others = chosen[: measured + fill], chosen[measured + fill :]
    text = _Text(tokenizer)
    last = topology(agents, 0)[-1]
    fixed = sum(len(s) for s in Template(last.name, last.template(), tokenizer).fixed)
    heard = answer_tokens * len(last.hears)
    tasks = [text.segment(problem.task_text) for problem in cases]
    typical = sorted(len(task) for task in tasks)[len(tasks) // 2]
    budget = prompt_tokens - fixed - heard - typical
    count = max(round(budget / DOCUMENT_TOKENS), 0)
    if budget < 0:
        raise InvalidInput(
            f"{prompt_tokens} prompt tokens are too few: fixed texts, task and messages take {prompt_tokens - budget}; "
            "ask for more"
        )
    nodes = topology(agents, count)
    source = _documents(others, text, seed)
    built = []
    for problem, task in zip(cases, tasks, strict=True):
        slots = {"task": task}
        left = max(prompt_tokens - fixed - heard - len(task), 0)
        for n in range(count):
            length = max(left // count - 8, 16)  # 8 tokens of heading each
            slots[f"document_{n + 1}"] = text.joined(source[n % 2], length)
        built.append(Case(problem, slots, _references(nodes, problem, others, text, answer_tokens)))
    return Workload(nodes, tuple(built[measured:]), tuple(built[:measured]), answer_tokens)


class _Text:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def segment(self, text: str) -> Segment:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return Segment(tuple(encoded["input_ids"]))

    def joined(self, texts: Iterator[str], length: int) -> Segment:
        """Whole texts one after the other until ``length`` tokens are reached, cut there."""
        ids: list[int] = []
        while len(ids) < length:
            text = next(texts, None)
            if text is None:
                raise InvalidInput("there is not enough real text left for so many documents; ask for fewer or shorter")
            ids += self.segment(text).token_ids
        return Segment(tuple(ids[:length]))


def _documents(others: Sequence[Problem], text: _Text, seed: int) -> tuple[Iterator[str], Iterator[str]]:
    """Worked examples and prose, none given out twice; prose goes on where the examples end."""
    prose = iter(passages(60, 400, seed))

    def examples() -> Iterator[str]:
        for problem in others:
            yield f"{problem.task_text}{problem.reference}\n"
        yield from prose

    return examples(), (f"{passage}\n\n" for passage in prose)


def _references(
    nodes: Sequence[Node], problem: Problem, others: Sequence[Problem], text: _Text, length: int
) -> dict[str, Segment]:
    """A text for each agent's message: the problem's own answer, then answers of others, cut to ``length`` tokens."""
    rng = random.Random(problem.id)
    found = {}
    for node in nodes:
        near = [problem, *rng.sample(list(others), min(3, len(others)))]
        found[node.name] = text.joined(iter([f"{p.reference}\n" for p in rng.sample(near, len(near))] * 8), length)
    return found
