"""Several ways to estimate offsets, learning from the very same observations, so that they can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.types import ModelFingerprint


class Followers(OffsetBook):
    """A book whose observations others learn too.

    Args:
        books: by the name of the method that uses each; they learn whatever this one does, in the same order.
    """

    def __init__(self, fingerprint: ModelFingerprint, books: Mapping[str, OffsetBook]) -> None:
        super().__init__(fingerprint)
        self.books = dict(books)

    def learn(self, observations: Sequence[Observation]) -> None:
        """As OffsetBook.learn, for all."""
        super().learn(observations)
        for book in self.books.values():
            book.learn(observations)
