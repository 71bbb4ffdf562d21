"""Questions about retrieved passages of Python's own reference (``pydoc_data.topics``): which word is missing?"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from eval.tasks.base import Problem, mentions
from eval.tasks.prose import sections, sentences
from eval.tasks.retrieval import BagOfWords, words

PASSAGE_WORDS = 60
MAX_PASSAGE_CHARACTERS = 700
RETRIEVED = 3
_BLANK = "_____"
_PLAIN_WORD = re.compile(r"""(?<![\w."'(])[a-z]{6,}(?![\w("'=])""")


@dataclass(frozen=True)
class Documents:
    """A problem is a sentence with one word left out, and the RETRIEVED passages nearest to it; no two share one.

    Passages that an earlier problem holds are not found again, so later problems have less tempting neighbours. The
    text is that of the running Python's version: compare runs under one version only.
    """

    @property
    def name(self) -> str:
        """The name in the registry."""
        return "documents"

    @cached_property
    def _problems(self) -> list[Problem]:
        held = [pair for pair in sections(PASSAGE_WORDS) if len(pair[1]) <= MAX_PASSAGE_CHARACTERS]
        texts = [f"Section {topic}: {text}" for topic, text in held]
        index = BagOfWords(texts)
        common = Counter(word for text in texts for word in set(words(text)))
        repeated = Counter(sentence for _, text in held for sentence in sentences(text))
        rng = random.Random(0)
        free, found = set(range(len(held))), []
        for number in rng.sample(range(len(held)), len(held)):
            topic, text = held[number]
            blank = _blank(text, common, repeated)
            if number not in free or blank is None:
                continue
            sentence, asked, word = blank
            nearest = [hit for hit in index.search(asked, len(held)) if hit in free][:RETRIEVED]
            if number not in nearest or len(nearest) < RETRIEVED:
                continue
            free -= set(nearest)
            shown = rng.sample(nearest, RETRIEVED)
            question = f'Which section says: "{asked}"? What is the missing word?'
            worked = f'The section {topic} says: "{sentence}" The missing word is "{word}".'
            documents = tuple(texts[hit] for hit in shown)
            found.append(Problem(f"{topic}/{number}", question, documents, word, worked, shown.index(number)))
        return found

    def problems(self) -> list[Problem]:
        """In an order drawn once; the passages stand in random order, so that the answer has no fixed place."""
        return list(self._problems)

    def score(self, problem: Problem, answer: str) -> float | None:
        """1.0 if the missing word stands in the answer."""
        return float(mentions(answer, problem.reference))


def _blank(text: str, common: Counter[str], repeated: Counter[str]) -> tuple[str, str, str] | None:
    """A sentence of ``text``, the same with its rarest plain word left out, and the word; None where none will do."""
    choices = []
    for place, sentence in enumerate(sentences(text)):
        if not 8 <= len(sentence.split()) <= 40 or repeated[sentence] > 1:
            continue
        for match in _PLAIN_WORD.finditer(sentence):
            word = match.group()
            if words(text).count(word) == 1:
                asked = f"{sentence[: match.start()]}{_BLANK}{sentence[match.end() :]}"
                choices.append((common[word], -len(word), place, match.start(), sentence, asked, word))
    return min(choices)[4:] if choices else None
