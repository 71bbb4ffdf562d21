"""A fact in one document, asked about in another place; the documents around it are real prose."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from eval.tasks.base import Problem, mentions
from eval.tasks.prose import passages, sections, sentences

PASSAGE_WORDS = 60
MAX_PASSAGE_CHARACTERS = 700
DOCUMENTS = 3
_KINDS = ("access code", "archive number", "serial number", "locker number", "invoice number")
_COLOURS = (
    "amber", "azure", "black", "bronze", "copper", "coral", "crimson", "golden", "green", "grey", "indigo", "ivory",
    "orange", "purple", "red", "scarlet", "silver", "violet", "white", "yellow",
)  # fmt: skip
_THINGS = (
    "archive", "barn", "boathouse", "bridge", "chapel", "depot", "factory", "gallery", "garage", "harbour", "hospital",
    "hotel", "laboratory", "library", "lighthouse", "market", "mill", "museum", "observatory", "school", "station",
    "studio", "theatre", "tower", "warehouse", "workshop",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """Each document holds one made-up fact of the same kind; one of them is asked about. No two problems share any."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "needle"

    @cached_property
    def _problems(self) -> list[Problem]:
        rng = random.Random(0)
        whole = passages(PASSAGE_WORDS, len(sections(PASSAGE_WORDS)))
        prose = [text for text in whole if len(text) <= MAX_PASSAGE_CHARACTERS]
        named = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
        rng.shuffle(named)
        numbers = rng.sample(range(10_000, 100_000), len(named))
        found = []
        for first in range(0, min(len(prose), len(named)) - DOCUMENTS + 1, DOCUMENTS):
            kind = rng.choice(_KINDS)
            group = range(first, first + DOCUMENTS)
            facts = [f"The {kind} of the {named[n]} is {numbers[n]}." for n in group]
            documents = tuple(_hidden(prose[n], fact, rng) for n, fact in zip(group, facts, strict=True))
            asked = rng.randrange(DOCUMENTS)
            question = f"What is the {kind} of the {named[first + asked]}? The reference material says it."
            reference = str(numbers[first + asked])
            name = named[first + asked].replace(" ", "-")
            found.append(Problem(name, question, documents, reference, facts[asked], asked))
        return found

    def problems(self) -> list[Problem]:
        """Always the same, under one version of Python, whose reference the prose is from."""
        return list(self._problems)

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the number asked for stands in the answer, and none of the other facts' numbers."""
        others = [number for text in problem.documents for number in _numbers(text) if number != problem.reference]
        return float(mentions(answer, problem.reference) and not any(mentions(answer, other) for other in others))


def _hidden(text: str, fact: str, rng: random.Random) -> str:
    """``text`` with the fact before, between or behind its sentences."""
    held = sentences(text)
    held.insert(rng.randint(0, len(held)), fact)
    return " ".join(held)


def _numbers(text: str) -> list[str]:
    """Numbers of the facts in ``text``."""
    facts = [sentence for sentence in sentences(text) if sentence.startswith(tuple(f"The {kind}" for kind in _KINDS))]
    return [fact.rstrip(".").rsplit(" ", 1)[-1] for fact in facts]
