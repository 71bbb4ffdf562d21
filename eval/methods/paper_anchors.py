"""The anchors of KVCOMM as published (NeurIPS 2025, arXiv 2510.12872): which are kept, when used, what they weigh.

A baseline to be compared with; kvcomm's own offsets are kvcomm.anchors. Shapes: L layers, H KV heads, D head dimension,
T tokens of the slot, F of the fixed text behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm.errors import InvalidInput
from kvcomm.types import SegmentKV


@dataclass(frozen=True, eq=False)
class Anchor:
    """One observed use of a slot.

    Attributes:
        base: of the slot's text, unrotated, [L, H, T, D].
        keys, values: dense minus base of that text, [L, H, T, D]; keys in the rotated frame of the anchor's position.
        after_keys, after_values: the same of the fixed text behind the slot, [L, H, F, D].
    """

    base: SegmentKV
    keys: torch.Tensor
    values: torch.Tensor
    after_keys: torch.Tensor
    after_values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Offset:
    """What to add to rotated keys and to values of a slot and of the fixed text behind it; layer 0 is zero."""

    keys: torch.Tensor
    values: torch.Tensor
    after_keys: torch.Tensor
    after_values: torch.Tensor


def entropy_passes(distances: torch.Tensor, gamma: float) -> bool:
    """The published test: the entropy of softmax(-distances), in bits, is at most gamma · log2(number of anchors).

    Args:
        distances: L2 distance of all base values to each anchor long enough, [N]; fewer than two never pass.
    """
    if len(distances) < 2:
        return False
    p = torch.softmax(-distances.double(), dim=0)
    entropy = float(-(p * (p + 1e-40).log2()).sum())
    return entropy <= gamma * math.log2(len(distances))


def token_weights(own: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Softmax over anchors of minus the mean distance of each token, over layers, heads and dimensions.

    Args:
        own: [L, H, T, D].
        anchors: [N, L, H, T, D].

    Returns:
        [N, 1, 1, T, 1].
    """
    return torch.softmax(-(own - anchors).abs().mean((1, 2, 4), keepdim=True).float(), dim=0)


def after_weights(own: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Weights for the text behind the slot: softmax of minus the L2 distance over the slot's tokens, by feature.

    Returns:
        [N, L, H, 1, D].
    """
    return torch.softmax(-(own - anchors).norm(2, dim=3, keepdim=True).float(), dim=0)


class AnchorPool:
    """Anchors of one slot of one agent, the oldest first.

    Args:
        limit: how many are kept; when one more comes, the least used of the ``window`` oldest goes.
    """

    def __init__(self, limit: int = 20, window: int = 5) -> None:
        if limit < 2 or window < 1:
            raise InvalidInput(f"{limit} anchors with a window of {window}: give at least 2 anchors and a window of 1")
        self.limit, self.window = limit, window
        self.anchors: list[Anchor] = []
        self.uses: list[int] = []

    def copy(self) -> AnchorPool:
        """A pool of its own with the same anchors."""
        other = AnchorPool(self.limit, self.window)
        other.anchors, other.uses = list(self.anchors), list(self.uses)
        return other

    def add(self, anchor: Anchor) -> None:
        """Keep an anchor, making room if need be."""
        if len(self.anchors) == self.limit:
            oldest = self.uses[: self.window]
            gone = oldest.index(min(oldest))
            del self.anchors[gone], self.uses[gone]
        self.anchors.append(anchor)
        self.uses.append(0)

    def match(self, base: SegmentKV, gamma: float) -> bool:
        """Whether the slot may be reused; if so, the anchors that make up 90 % of the softmax count as used once."""
        fit = self._fit(len(base))
        distances = self._distances(base, fit)
        if not entropy_passes(distances, gamma):
            return False
        p = torch.softmax(-distances.double(), dim=0)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        for n in order[before < 0.9].tolist():
            self.uses[fit[n]] += 1
        return True

    def offset(self, base: SegmentKV) -> Offset:
        """The weighted sum of the offsets of all anchors long enough, keys and values weighted apart."""
        tokens = len(base)
        used = [self.anchors[n] for n in self._fit(tokens)]
        weights_k = self._weights(base.keys, [a.base.keys for a in used])
        weights_v = self._weights(base.values, [a.base.values for a in used])
        return Offset(
            _blend(weights_k[0], [a.keys[:, :, :tokens] for a in used]),
            _blend(weights_v[0], [a.values[:, :, :tokens] for a in used]),
            _blend(weights_k[1], [a.after_keys for a in used]),
            _blend(weights_v[1], [a.after_values for a in used]),
        )

    def _fit(self, tokens: int) -> list[int]:
        return [n for n, anchor in enumerate(self.anchors) if len(anchor.base) >= tokens]

    def _distances(self, base: SegmentKV, fit: Sequence[int]) -> torch.Tensor:
        tokens = len(base)
        found = [(base.values - self.anchors[n].base.values[:, :, :tokens]).norm() for n in fit]
        return torch.stack(found) if found else torch.zeros(0)

    def _weights(self, own: torch.Tensor, bases: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = own.shape[2]
        first = torch.stack([base[:, :, :tokens] for base in bases])
        last = torch.stack([base[:, :, base.shape[2] - tokens :] for base in bases])
        return token_weights(own, first), after_weights(own, last)


def _blend(weights: torch.Tensor, offsets: Sequence[torch.Tensor]) -> torch.Tensor:
    blended = (weights * torch.stack(list(offsets))).sum(0)
    blended[0] = 0
    return blended
