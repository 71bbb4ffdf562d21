"""What two texts have in common: by hand, against difflib, and on texts made to be slow."""

from __future__ import annotations

import time
from difflib import SequenceMatcher
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcomm.anchors.match import MIN_RUN, Match, match
from kvcomm.errors import InvalidInput

Edits = list[tuple[int, int, list[int]]]
EDITS = st.lists(
    st.tuples(st.integers(0, 399), st.integers(0, 9), st.lists(st.integers(0, 999), max_size=9)), max_size=9
)


def edited(base: list[int], edits: Edits) -> list[int]:
    """``base`` with runs of tokens replaced by others: (where, how many, by what)."""
    text = list(base)
    for at, gone, new in edits:
        at = at % (len(text) + 1)
        text[at : at + gone] = new
    return text


def test_a_replaced_token() -> None:
    base = list(range(20))
    found = match([*base[:9], 99, *base[10:]], base)
    assert found.source == (*range(9), -1, *range(10, 20))
    assert (found.absent, found.share) == ((9,), 19 / 20)
    assert found.after_edits(3) == (10, 11, 12)
    assert str(found) == "1 of 20 tokens differ from a held text of 20"


def test_insertion_deletion_and_a_new_beginning() -> None:
    base = list(range(40))
    inserted = match([*base[:10], 90, 91, *base[10:]], base)
    assert inserted.source == (*range(10), -1, -1, *range(10, 40)) and inserted.share == 40 / 42
    assert inserted.after_edits(2) == (12, 13)
    deleted = match(base[:10] + base[15:], base)
    assert deleted.source == (*range(10), *range(15, 40)) and deleted.absent == ()
    assert deleted.after_edits(2) == (10, 11) and deleted.share == 35 / 40
    begun = match(base[3:], base)
    assert begun.source == tuple(range(3, 40)) and begun.after_edits(1) == (0,)
    assert match([90, *base], base).after_edits(1) == (1,)
    ended = match(base[:-3], base)
    assert ended.source == tuple(range(37)) and ended.after_edits(4) == ()


def test_edits_near_each_other() -> None:
    base = list(range(60))
    text = [*base[:20], 90, *base[21:28], 91, *base[29:40], 92, *base[41:]]  # 7 tokens between the first two
    found = match(text, base)
    assert found.absent == (*range(20, 29), 40)
    assert match(text, base, min_run=7).absent == (20, 28, 40)
    assert found.after_edits(0) == ()
    assert found.after_edits(12) == (*range(29, 40), *range(41, 53))  # as far as a run goes


def test_nothing_short_or_empty_is_in_common() -> None:
    seven = list(range(7))
    assert match(seven, seven).source == (-1,) * 7
    assert match([], seven) == Match((), 7) and match(seven, []).share == match([], []).share == 0.0
    assert match([4], [4]).share == 0.0 and match([4], [4], min_run=1).share == 1.0
    assert match(list(range(100)), list(range(200, 300))).share == 0.0
    with pytest.raises(InvalidInput, match="give at least 1 token"):
        match(seven, seven, min_run=0)


def test_a_passage_that_moved_counts_once() -> None:
    base = list(range(90))
    found = match(base[30:] + base[:30], base)
    assert found.source == (*range(30, 90), *(-1,) * 30)


def test_repeated_tokens() -> None:
    same = [5] * 300
    assert match(same, same).share == 1.0
    assert match(same[:-20], same).source == tuple(range(280))
    assert match([*same[:100], 6, *same[101:]], same).absent == (100,)
    lines = [t for n in range(40) for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 1000 + n)]  # 9 of 10 tokens are the same
    changed = list(lines)
    changed[55] = changed[255] = 77
    assert match(changed, lines).absent == (55, 255)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 20, 1000]), st.integers(0, 400), EDITS, st.integers(1, 12))
@example(0, 2, 300, [(100, 1, [7])], 8)
def test_what_is_in_common_is_equal_increases_and_runs_on(
    seed: int, words: int, length: int, edits: Edits, min_run: int
) -> None:
    random = Random(seed)
    base = [random.randrange(words) for _ in range(length)]
    text = edited(base, edits)
    found = match(text, base, min_run)
    assert len(found.source) == len(text) and found.base_tokens == len(base)
    pairs = [(n, at) for n, at in enumerate(found.source) if at >= 0]
    assert all(text[n] == base[at] for n, at in pairs)
    assert all(a < b for (_, a), (_, b) in pairwise(pairs))
    runs: list[int] = []
    for (n, at), before in zip(pairs, [(-9, -9), *pairs], strict=False):
        if (n - 1, at - 1) == before:
            runs[-1] += 1
        else:
            runs.append(1)
    assert all(run >= min_run for run in runs)
    assert sorted({*found.absent, *(n for n, _ in pairs)}) == list(range(len(text)))
    assert 0.0 <= found.share <= 1.0
    assert set(found.after_edits(3)) <= {n for n, _ in pairs}
    if text == base and length >= min_run:
        assert found.share == 1.0 and found.after_edits(3) == ()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), EDITS)
def test_as_much_is_found_as_by_difflib(seed: int, edits: Edits) -> None:
    random = Random(seed)
    base = [min(int(random.expovariate(0.02)), 999) for _ in range(400)]  # few frequent words, many rare
    text = edited(base, edits)
    blocks = SequenceMatcher(None, base, text, autojunk=False).get_matching_blocks()
    theirs = sum(block.size for block in blocks if block.size >= MIN_RUN)
    found = match(text, base)
    assert len(text) - len(found.absent) >= theirs - 2 * MIN_RUN


@pytest.mark.parametrize("kind", ["one token", "period", "scrambled", "two words", "halves", "nested"])
def test_no_text_is_slow(kind: str) -> None:
    random, n = Random(1), 4000
    many = [random.randrange(50000) for _ in range(n)]
    pieces = [many[i : i + 9] for i in range(0, n, 9)]
    shuffled = random.sample(pieces, len(pieces))
    two = [random.randrange(2) for _ in range(n)]
    nested = [t for i in range(n // 10) for t in ([i] * 9 + [60000 + i])]
    text, base = {
        "one token": ([5] * n, [5] * (n // 2) + [6] + [5] * (n // 2)),
        "period": ([1, 2, 3] * 1300, [3, 1, 2] * 1300),
        "scrambled": ([t for piece in shuffled for t in piece], many),
        "two words": (edited(two, [(2000, 1, [9]), (999, 3, [8])]), two),
        "halves": (many[n // 2 :] + many[: n // 2], many),
        "nested": (nested[::-1], nested),
    }[kind]
    start = time.perf_counter()
    match(text, base)
    assert time.perf_counter() - start < 1.0  # milliseconds; difflib takes a second and more for some of these
