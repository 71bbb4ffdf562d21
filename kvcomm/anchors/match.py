"""What two nearly equal texts have in common: for each token of one its counterpart in the other.

The ends in common are taken first. Between them, short runs of tokens that stand once in either text are anchors; the
longest chain of anchors in the same order is kept and each is widened as far as it goes; what lies between two is
looked at again by itself, where more runs stand once (patience diff, after Bram Cohen, on runs of tokens instead of
lines). Unlike difflib's, the time stays within milliseconds for any text of a few thousand tokens; benchmarks/index.py
has both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvcomm.errors import InvalidInput

MIN_RUN = 8
"""Tokens in a row that must be in common to count; shorter runs are scattered words in other contexts."""
_Tokens = npt.NDArray[np.uint64]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Match:
    """How a base's tokens stand to those of a nearly equal text.

    Attributes:
        source: for each token of the text the index of its counterpart in the base, or -1; those not -1 increase.
        base_tokens: tokens of the base.
    """

    source: tuple[int, ...]
    base_tokens: int

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """Indices of the text's tokens without a counterpart, increasing."""
        return tuple(n for n, at in enumerate(self.source) if at < 0)

    @property
    def share(self) -> float:
        """Tokens in common over the tokens of the longer of the two; 0 where both are empty."""
        longer = max(len(self.source), self.base_tokens)
        return (len(self.source) - len(self.absent)) / longer if longer else 0.0

    def after_edits(self, count: int) -> tuple[int, ...]:
        """Indices of the first ``count`` tokens, as far as they are in common, behind each place where the two differ.

        Their KV, held though it is, was computed right behind other tokens.
        """
        found: list[int] = []
        left, before = 0, -1
        for n, at in enumerate(self.source):
            if at >= 0:
                if at != before + 1 or (n and self.source[n - 1] < 0):
                    left = count
                if left:
                    found.append(n)
                    left -= 1
                before = at
        return tuple(found)

    def __str__(self) -> str:
        return f"{len(self.absent)} of {len(self.source)} tokens differ from a held text of {self.base_tokens}"


def match(text: Sequence[int], base: Sequence[int], min_run: int = MIN_RUN) -> Match:
    """Runs of at least ``min_run`` tokens that ``text`` and ``base`` have in common, in the same order in both.

    Raises:
        InvalidInput: ``min_run`` is below 1.
    """
    if min_run < 1:
        raise InvalidInput(f"min_run is {min_run}; give at least 1 token")
    a, b = np.array(text, dtype=np.uint64), np.array(base, dtype=np.uint64)
    head = _common(a, b)
    tail = _common(a[head:][::-1], b[head:][::-1])
    source = np.full(len(a), -1, dtype=np.int64)
    source[:head] = np.arange(head)
    source[len(a) - tail :] = np.arange(len(b) - tail, len(b))
    gaps = [(head, len(a) - tail, head, len(b) - tail)]
    while gaps:
        a0, a1, b0, b1 = gaps.pop()
        at_a, at_b = a0, b0
        for i, j, length in _runs(a[a0:a1], b[b0:b1], min_run):
            i, j = i + a0, j + b0
            source[i : i + length] = np.arange(j, j + length)
            gaps.append((at_a, i, at_b, j))
            at_a, at_b = i + length, j + length
        if at_a > a0:
            gaps.append((at_a, a1, at_b, b1))
    return Match(tuple(_without_short(source, min_run).tolist()), len(b))


def _common(a: _Tokens, b: _Tokens) -> int:
    """Length of the beginning that both have in common."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if bool(same.all()) else int(same.argmin())


def _runs(a: _Tokens, b: _Tokens, min_run: int) -> Iterator[tuple[int, int, int]]:
    """Runs in common, widened from anchors, in order and apart: (start in a, start in b, length)."""
    end_a = end_b = 0
    for i, j in _chain(*_anchors(a, b, min_run)):
        if i < end_a or j < end_b:
            continue
        length = _common(a[i:], b[j:])
        if length < min_run:  # two runs with one hash
            continue
        back = _common(a[end_a:i][::-1], b[end_b:j][::-1])
        end_a, end_b = i + length, j + length
        yield i - back, j - back, length + back


def _anchors(a: _Tokens, b: _Tokens, min_run: int) -> tuple[list[int], list[int]]:
    """Starts in a, increasing, and in b of the runs of ``min_run`` tokens that stand once in each."""
    if min(len(a), len(b)) < min_run:
        return [], []
    starts = []
    for tokens in (a, b):
        hashes = np.zeros(len(tokens) - min_run + 1, dtype=np.uint64)
        for k in range(min_run):
            hashes = (hashes ^ (hashes >> np.uint64(29))) * _MULTIPLIER + tokens[k : k + len(hashes)] + np.uint64(1)
        values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        starts.append((values[counts == 1], first[counts == 1]))
    (values_a, first_a), (values_b, first_b) = starts
    _, in_a, in_b = np.intersect1d(values_a, values_b, assume_unique=True, return_indices=True)
    i, j = first_a[in_a], first_b[in_b]
    order = np.argsort(i)
    return i[order].tolist(), j[order].tolist()


def _chain(i: list[int], j: list[int]) -> list[tuple[int, int]]:
    """The longest subsequence of the pairs in which j increases too (patience sorting)."""
    tops: list[int] = []
    tops_at: list[int] = []
    previous = [-1] * len(j)
    for n, value in enumerate(j):
        pile = bisect_left(tops, value)
        if pile:
            previous[n] = tops_at[pile - 1]
        if pile == len(tops):
            tops.append(value)
            tops_at.append(n)
        else:
            tops[pile], tops_at[pile] = value, n
    chain: list[tuple[int, int]] = []
    n = tops_at[-1] if tops_at else -1
    while n >= 0:
        chain.append((i[n], j[n]))
        n = previous[n]
    return chain[::-1]


def _without_short(source: npt.NDArray[np.int64], min_run: int) -> npt.NDArray[np.int64]:
    """``source`` without the runs in common that have fewer than ``min_run`` tokens."""
    if not len(source):
        return source
    begins = np.flatnonzero(np.concatenate([[True], (source[1:] != source[:-1] + 1) | (source[:-1] < 0)]))
    lengths = np.diff(np.concatenate([begins, [len(source)]]))
    return np.where(np.repeat(lengths < min_run, lengths), -1, source)
