"""Offsets of the nearest anchors: a softmax over the distance between token embeddings, token by token.

The estimator of KVCOMM (arXiv 2510.12872): the offset of a token is a weighted mean of what was observed at the same
token index of stored anchors, weighted by how near their tokens are. Keys and values of layer 0 depend on the token
alone, so they serve as its embedding. Unlike the other estimators it needs the observations themselves and not their
sums; they do not add across processes, and they are bounded in number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.offset import NoOffset, Predictor
from kvcomm.anchors.statistics import Pair, features
from kvcomm.errors import InvalidInput
from kvcomm.types import ModelFingerprint, SegmentKV


@dataclass(frozen=True, eq=False)
class Anchor:
    """One observation kept whole.

    Attributes:
        embedding: [T, n_kv_heads * 2 * head_dim] float32, the base's layer 0.
        offset: [n_layers - 1, n_kv_heads, T, 2 * head_dim] in the base's dtype.
    """

    embedding: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def of(cls, base: SegmentKV, true: SegmentKV) -> Anchor:
        """What ``true`` adds to ``base``; shapes as SegmentKV."""
        offset = features(true).float() - features(base).float()
        return cls(embedding_of(base), offset.to(base.keys.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.embedding.nbytes + self.offset.nbytes


def embedding_of(kv: SegmentKV) -> torch.Tensor:
    """Layer 0's unrotated key and value of each token, all heads side by side: [T, n_kv_heads * 2 * head_dim]."""
    return torch.cat([kv.keys[0], kv.values[0]], dim=-1).transpose(0, 1).flatten(1).float()


@dataclass(frozen=True)
class SoftmaxOffset:
    """Configuration of the estimator.

    Attributes:
        temperature: distances are divided by it; in units of the mean distance between an anchor's tokens and the
            base's, so that it means the same for every model.
        max_anchors: anchors kept for each pair, the latest; older ones leave.
    """

    temperature: float = 0.2
    max_anchors: int = 16

    def __post_init__(self) -> None:
        if not self.temperature > 0 or self.max_anchors < 1:
            raise InvalidInput(
                f"temperature is {self.temperature} and max_anchors {self.max_anchors}; give a temperature above 0 and "
                "at least 1 anchor"
            )

    def over(self, anchors: Mapping[Pair, Sequence[Anchor]]) -> Predictor | None:
        """A predictor from stored anchors, or None while there are none."""
        return SoftmaxPredictor(self.temperature, {p: tuple(a) for p, a in anchors.items()}) if anchors else None


@dataclass(frozen=True)
class SoftmaxPredictor:
    """Anchors by pair, constant."""

    temperature: float
    anchors: Mapping[Pair, tuple[Anchor, ...]]

    def predict(self, pair: Pair, base: SegmentKV) -> torch.Tensor | None:
        """None for a pair never seen. Tokens beyond every anchor's end are compared with the anchors' last ones."""
        held = self.anchors.get(pair)
        if not held:
            return None
        device = base.keys.device
        index = torch.arange(len(base), device=device)
        lengths = torch.tensor([len(anchor.embedding) for anchor in held], device=device)
        at = torch.minimum(index[None], lengths[:, None] - 1)  # [anchors, T]
        weights = self._weights(embedding_of(base), held, at, index, lengths)
        out = torch.zeros(features(base).shape, dtype=torch.float32, device=device)
        for n, anchor in enumerate(held):
            out += weights[n, :, None] * anchor.offset.to(device)[:, :, at[n]].float()
        return out

    def _weights(
        self,
        embedding: torch.Tensor,
        held: Sequence[Anchor],
        at: torch.Tensor,
        index: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """[anchors, T]: each column a softmax over the anchors that reach the token's index, or all if none does."""
        near = torch.stack([a.embedding.to(embedding.device)[at[n]] for n, a in enumerate(held)])
        distance = (near - embedding[None]).norm(dim=-1)
        scale = distance.mean().clamp_min(1e-12) * self.temperature
        reaches = index[None] < lengths[:, None]
        reaches |= ~reaches.any(0, keepdim=True)
        return torch.softmax((-distance / scale).masked_fill(~reaches, -torch.inf), dim=0)


class SoftmaxBook(OffsetBook):
    """An offset book that keeps its latest observations whole and predicts from them.

    It stands wherever an OffsetBook does: predictions are tested before they are learned from, and shrunk by what they
    were worth. Its anchors live in memory; what is saved of it is the sums and the tests, as of any book.
    """

    def __init__(self, fingerprint: ModelFingerprint, softmax: SoftmaxOffset | None = None) -> None:
        super().__init__(fingerprint, NoOffset())
        self.softmax = softmax if softmax is not None else SoftmaxOffset()
        self.anchors: dict[Pair, deque[Anchor]] = {}

    def learn(self, observations: Sequence[Observation]) -> None:
        """As OffsetBook.learn; then the observations become anchors."""
        super().learn(observations)
        with self._lock:
            for seen in observations:
                if len(seen.base):
                    held = self.anchors.setdefault(seen.pair, deque(maxlen=self.softmax.max_anchors))
                    held.append(Anchor.of(seen.base, seen.true))

    def forget(self, which: Callable[[str], bool]) -> int:
        """As OffsetBook.forget, and the pairs' anchors with it."""
        with self._lock:
            for pair in [pair for pair in self.anchors if which(pair.captured) or which(pair.used)]:
                del self.anchors[pair]
        return super().forget(which)

    def clear(self) -> int:
        """As OffsetBook.clear, and all anchors with it."""
        with self._lock:
            self.anchors.clear()
        return super().clear()

    def predictor(self) -> Predictor | None:
        """The estimator over the anchors held now."""
        with self._lock:
            return self.softmax.over(self.anchors)

    @property
    def nbytes(self) -> int:
        """Bytes held by all anchors."""
        return sum(anchor.nbytes for held in self.anchors.values() for anchor in held)
