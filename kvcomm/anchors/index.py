"""The neighbour index: which held texts are nearly this one, found without a model in well under a millisecond.

A text is stood for by a sketch: its token bigrams, each hashed to one of 256 places and a sign (feature hashing,
Weinberger et al., arXiv 0902.2206). The product of two sketches estimates how alike the bags of bigrams are, with an
error of about 1/sqrt(256). Of a text of which the share s is left in runs of 8 tokens or more, 7/8 s of the bigrams
are left at least, wherever the edits are; texts that share only their words have few bigrams in common. It needs
neither a model nor stored KV, so that looking up costs next to nothing where nothing is found. It only proposes: what
is really in common is for kvcomm.anchors.match to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcomm.errors import InvalidInput
from kvcomm.types import Segment

DIM = 256
EXACT_UP_TO = 16384
"""Texts up to which every one is compared; above, those in the nearest quarter of the cells (faiss IVF)."""
_CELLS = 256
_PROBED = _CELLS // 4
_START = np.uint64(2**32)  # stands before a text's first token; no token has this id
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Neighbour:
    """A held text and the cosine of its sketch with the one that was asked for."""

    segment: Segment
    cosine: float


def sketch(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Sketch of token ids: [256] float32 of length 1, or 0 for no tokens.

    A bigram that stands n times weighs sqrt(n), so that a text full of one thing is not that thing alone.
    """
    ids = np.array(token_ids, dtype=np.uint64)
    before = np.concatenate([np.array([_START], dtype=np.uint64), ids])[: len(ids)]
    grams, counts = np.unique(_mixed(_mixed(before) + ids), return_counts=True)
    weights = np.sqrt(counts) * np.where(grams & np.uint64(1 << 32), 1.0, -1.0)
    place = (grams % np.uint64(DIM)).astype(np.int64)
    total = np.bincount(place, weights=weights, minlength=DIM)
    length = float(np.linalg.norm(total))
    return (total / (length or 1.0)).astype(np.float32)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the result depends on every bit given."""
    values = values + _MIX[0]
    values = (values ^ (values >> np.uint64(30))) * _MIX[1]
    values = (values ^ (values >> np.uint64(27))) * _MIX[2]
    return values ^ (values >> np.uint64(31))


class NeighbourIndex:
    """Texts of one pool, found by likeness. Built from what is put into it; it is neither saved nor loaded.

    It keeps 2 KiB a text: its sketch, and faiss's copy of that. Texts are added and dropped one by one; above
    ``exact_up_to`` the cells are laid out anew once as many were added as they were made from.

    Args:
        exact_up_to: number of texts up to which the search compares all.

    Raises:
        InvalidInput: ``exact_up_to`` is smaller than the number of cells.
    """

    def __init__(self, exact_up_to: int = EXACT_UP_TO) -> None:
        if exact_up_to < _CELLS:
            raise InvalidInput(f"exact_up_to is {exact_up_to}; give at least {_CELLS} texts, one for each cell")
        self.exact_up_to = exact_up_to
        self._index: Any = None
        self._held: dict[int, tuple[Segment, npt.NDArray[np.float32]]] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._stale_at: int | None = None

    @property
    def exact(self) -> bool:
        """Whether a search compares every text."""
        return self._stale_at is None

    def add(self, segment: Segment) -> bool:
        """Hold a text; returns False where it is held already or has no tokens."""
        if not len(segment) or segment.digest in self._numbers:
            return False
        vector = sketch(segment.token_ids)
        self._numbers[segment.digest] = self._next
        self._held[self._next] = segment, vector
        if self._index is None:
            self._index = _flat()
        self._index.add_with_ids(vector[None], np.array([self._next], dtype=np.int64))
        self._next += 1
        grown = self._stale_at is None and len(self._held) > self.exact_up_to
        if grown or (self._stale_at is not None and self._next >= self._stale_at):
            self._rebuild()
        return True

    def remove(self, segment: Segment) -> bool:
        """Drop a text; returns False where it is not held."""
        number = self._numbers.pop(segment.digest, None)
        if number is None:
            return False
        del self._held[number]
        self._index.remove_ids(np.array([number], dtype=np.int64))
        if self._stale_at is not None and 2 * len(self._held) < self.exact_up_to:
            self._rebuild()
        return True

    def nearest(self, segment: Segment, count: int, least: float) -> list[Neighbour]:
        """Up to ``count`` held texts whose cosine is ``least`` or more, the nearest first; the same text is one.

        Raises:
            InvalidInput: ``count`` is below 1.
        """
        if count < 1:
            raise InvalidInput(f"count is {count}; ask for at least 1 neighbour")
        if not self._held or not len(segment):
            return []
        cosines, numbers = self._index.search(sketch(segment.token_ids)[None], min(count, len(self._held)))
        return [
            Neighbour(self._held[number][0], cosine)
            for number, cosine in zip(numbers[0].tolist(), cosines[0].tolist(), strict=True)
            if number >= 0 and cosine >= least
        ]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, segment: Segment) -> bool:
        return segment.digest in self._numbers

    def _rebuild(self) -> None:
        """Lay the index out anew from the sketches held: flat, or in cells where there are many."""
        exact = len(self._held) <= self.exact_up_to
        numbers = np.fromiter(self._held, dtype=np.int64, count=len(self._held))
        vectors = np.stack([vector for _, vector in self._held.values()])
        self._index = _flat() if exact else _cells(vectors)
        self._index.add_with_ids(vectors, numbers)
        self._stale_at = None if exact else self._next + len(self._held)


def _flat() -> Any:
    import faiss

    return faiss.IndexIDMap2(faiss.IndexFlatIP(DIM))


def _cells(vectors: npt.NDArray[np.float32]) -> Any:
    """An empty inverted file whose cells were made from ``vectors`` [n, 256]; the same ones for the same vectors."""
    import faiss

    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, _CELLS, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 5, 1, 32
    index.train(vectors)
    index.nprobe = _PROBED
    return index
