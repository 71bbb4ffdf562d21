"""Retrieval by the words that texts share: hashed bags of words in a faiss index."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DIMENSIONS = 4_096


def words(text: str) -> list[str]:
    """Words of ``text`` in lower case, numbers and names with underscores among them."""
    return re.findall(r"\w+", text.lower())


class BagOfWords:
    """An exact index of texts by cosine; a word counts by the logarithm of its frequency times its rarity.

    Words are hashed by BLAKE2b, not by Python's own hash, which differs from process to process.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        import faiss

        held = Counter(bucket for text in texts for bucket in {_bucket(word) for word in words(text)})
        self._rarity = np.ones(DIMENSIONS, dtype=np.float32)
        for bucket, count in held.items():
            self._rarity[bucket] = np.log((1 + len(texts)) / count)
        self._index = faiss.IndexFlatIP(DIMENSIONS)
        self._index.add(np.stack([self._vector(text) for text in texts]))

    def search(self, query: str, count: int) -> list[int]:
        """Indices of the ``count`` nearest texts, nearest first."""
        _, found = self._index.search(self._vector(query)[None], min(count, self._index.ntotal))
        return [int(index) for index in found[0]]

    def _vector(self, text: str) -> NDArray[np.float32]:
        vector = np.zeros(DIMENSIONS, dtype=np.float32)
        for word, count in Counter(words(text)).items():
            vector[_bucket(word)] += 1 + np.log(count)
        vector *= self._rarity
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def _bucket(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % DIMENSIONS
