"""Where the texts of a case come from: a problem's own documents, filler for what room is left, stand-in messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

from transformers import PreTrainedTokenizerBase

from eval.tasks.base import Problem
from eval.tasks.prose import docstrings, passages, sentences
from eval.topologies import Node
from kvcomm import Segment
from kvcomm.errors import InvalidInput

HEADING_TOKENS = 8
"""What a document's heading takes in a template."""
MIN_TOKENS = 16
"""No filler is cut shorter."""
MIN_OWN_TOKENS = 32
"""No document of a problem is cut shorter."""
_WINDOWS = 64


class Tokens:
    """Texts as token ids, each text tokenised once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Segment] = {}

    def segment(self, text: str) -> Segment:
        """The whole text."""
        if text not in self._known:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            self._known[text] = Segment(tuple(encoded["input_ids"]))
        return self._known[text]

    def beginning(self, text: str) -> tuple[int, ...]:
        """The ids that every cut of a problem's document keeps: two texts that differ here never become one segment."""
        return tuple(self.segment(text).token_ids[:MIN_OWN_TOKENS])

    def joined(self, texts: Iterator[str], length: int) -> Segment:
        """Whole texts one after the other until ``length`` tokens are reached, cut there."""
        ids: list[int] = []
        while len(ids) < length:
            text = next(texts, None)
            if text is None:
                raise InvalidInput("there is not enough real text left for so many documents; ask for fewer or shorter")
            ids += self.segment(text).token_ids
        return Segment(tuple(ids[:length]))


def fitted(problem: Problem, text: Tokens, slots: int, room: int) -> list[Segment]:
    """The problem's first ``slots`` documents, the answering one among them, the longest cut to ``room`` tokens in all.

    The answering document is cut only where the others are at MIN_OWN_TOKENS.
    """
    kept = list(range(min(slots, len(problem.documents))))
    answer = problem.answered_in
    if answer is not None and kept and answer not in kept:
        kept[-1] = answer
    whole = {n: text.segment(problem.documents[n]) for n in kept}
    cut = {}
    if answer in whole:
        others = sum(min(len(whole[n]), MIN_OWN_TOKENS) for n in kept if n != answer)
        cut[answer] = max(min(len(whole[answer]), room - others), MIN_OWN_TOKENS)
        room -= cut[answer]
    rest = sorted((n for n in kept if n != answer), key=lambda n: len(whole[n]))
    for done, n in enumerate(rest):
        cut[n] = min(len(whole[n]), max(room // (len(rest) - done), MIN_OWN_TOKENS))
        room -= cut[n]
    return [Segment(tuple(whole[n].token_ids[: cut[n]])) for n in kept]


def fillers(others: Sequence[Problem], cases: Sequence[Problem], seed: int) -> tuple[Iterator[str], Iterator[str]]:
    """Worked examples and prose, none given out twice; prose goes on where the examples end.

    Prose is Python's language reference; where that ends, docstrings of its standard library.
    Passages with a sentence that a case's own documents or an example has are left out.
    """
    held = "\n".join([text for case in cases for text in case.documents] + [p.message for p in [*cases, *others]])

    def unlike() -> Iterator[str]:
        known = held
        for source in (passages(60, 400, seed), docstrings(60, seed)):
            given = []
            for passage in source:
                if not _repeats(passage, known):
                    yield passage
                given.append(passage)
            known = "\n".join([known, *given])

    prose = unlike()

    def examples() -> Iterator[str]:
        for problem in others:
            between = "\n" if problem.worked else ""
            yield f"{problem.task_text}{between}{problem.message}\n"
        yield from prose

    return examples(), (f"{passage}\n\n" for passage in prose)


def _repeats(passage: str, held: str) -> bool:
    return any(sentence in held for sentence in sentences(passage) if len(sentence.split()) >= 6)


class Messages:
    """Texts that stand for agents' messages: the problem's own answer and answers of others, cut to one length.

    What stands in a measured case's messages is in no other's that is learned from, so ask for the measured ones first.
    """

    def __init__(self, text: Tokens, others: Sequence[Problem], length: int) -> None:
        self._text, self._others, self._length = text, list(others), length
        self._used: set[str] = set()
        self._held: set[tuple[int, ...]] = set()

    def of(self, nodes: Sequence[Node], problem: Problem, measured: bool) -> dict[str, Segment]:
        """A message for each agent.

        Raises:
            InvalidInput: what the problem has to say is, over and over, what a measured case says.
        """
        rng = random.Random(problem.id)
        found = {}
        for node in nodes:
            near = [problem, *rng.sample(self._others, min(3, len(self._others)))]
            near = rng.sample(near, len(near))
            if measured:
                ids, used = next(self._windows(near))
                self._used |= used
                self._held.add(ids)
            else:
                near = [p for p in near if p.id not in self._used]
                ids = self._fresh(near, problem.id)
            found[node.name] = Segment(ids)
        return found

    def _fresh(self, near: Sequence[Problem], name: str) -> tuple[int, ...]:
        for _, (ids, _) in zip(range(_WINDOWS), self._windows(near), strict=False):
            if ids not in self._held:
                return ids
        raise InvalidInput(
            f"problem {name!r} has no message that a measured problem has not; give its answer written out (worked)"
        )

    def _windows(self, near: Iterable[Problem]) -> Iterator[tuple[tuple[int, ...], set[str]]]:
        """The texts joined over and over, ``length`` tokens at a time, with the names of the problems in it."""
        endless = cycle(near)
        ids: list[int] = []
        used: set[str] = set()
        while True:
            while len(ids) < self._length:
                problem = next(endless)
                ids += self._text.segment(f"{problem.message}\n").token_ids
                used.add(problem.id)
            yield tuple(ids[: self._length]), set(used)
            ids = ids[self._length :]
