"""Prose: long enough, plain, disjoint, the same for the same seed."""

from __future__ import annotations

from itertools import islice

import pytest

from eval.tasks.prose import docstrings, passages, sections, topics
from kvcomm.errors import InvalidInput


def test_passages_have_the_words_asked_for() -> None:
    for words in (40, 120, 300):
        for text in passages(words, 20):
            assert words <= len(text.split()) < words + 120
            assert "::=" not in text and "****" not in text and "\n" not in text


def test_passages_share_nothing_and_follow_the_seed() -> None:
    texts = passages(100, 100, seed=3)
    assert len(set(texts)) == 100 and texts == passages(100, 100, seed=3)
    assert texts != passages(100, 100, seed=4)


def test_there_is_enough_of_it() -> None:
    assert sum(len(p.split()) for paragraphs in topics().values() for p in paragraphs) > 20_000


def test_too_much_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidInput, match=r"has \d+ passages of 200 words, 5000 were asked for"):
        passages(200, 5000)
    with pytest.raises(InvalidInput, match="words=0"):
        passages(0, 1)


def test_docstrings_go_on_where_passages_end() -> None:
    first = list(islice(docstrings(60, seed=1), 100))
    assert first == list(islice(docstrings(60, seed=1), 100)) != list(islice(docstrings(60, seed=2), 100))
    assert len(set(first)) == 100 and not set(first) & {text for _, text in sections(60)}
    assert all(len(text.split()) >= 60 and "\n" not in text for text in first)
