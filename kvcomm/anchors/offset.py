"""Estimating what a new context adds to a base: one interface, several estimators, each on the same statistics.

An estimator is a frozen dataclass whose fields are its configuration and whose one function solves the statistics into
a predictor. All work in the unrotated frame, where an offset does not depend on the position of use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import torch

from kvcomm.anchors.statistics import OffsetStatistics, Pair, PairSums, bucket_of, features, total_sums
from kvcomm.rope.view import LinearMap
from kvcomm.types import SegmentKV


class Predictor(Protocol):
    """Statistics solved for use; constant."""

    def predict(self, pair: Pair, base: SegmentKV) -> torch.Tensor | None:
        """Offset of ``base`` used at ``pair.used``: [n_layers - 1, n_kv_heads, T, 2 * head_dim] float32, or None."""
        ...


class OffsetEstimator(Protocol):
    """A way to estimate offsets."""

    def solve(self, statistics: OffsetStatistics) -> Predictor | None:
        """A predictor from what was observed, or None while that is too little."""
        ...


@dataclass(frozen=True)
class NoOffset:
    """Re-rotation only: the base is used as it is."""

    def solve(self, statistics: OffsetStatistics) -> Predictor | None:
        return None


@dataclass(frozen=True)
class MeanOffset:
    """The running mean of the offsets seen for a pair, by bucket of token index; nothing for a pair never seen."""

    def solve(self, statistics: OffsetStatistics) -> Predictor | None:
        means = {pair: _mean(sums, sums.y) for pair, sums in statistics.pairs.items()}
        return MeanPredictor(means) if means else None


@dataclass(frozen=True)
class MeanPredictor:
    """Mean offsets by pair: [layers - 1, heads, buckets, F] float32."""

    means: Mapping[Pair, torch.Tensor]

    def predict(self, pair: Pair, base: SegmentKV) -> torch.Tensor | None:
        mean = self.means.get(pair)
        return None if mean is None else mean.to(base.keys.device)[:, :, _buckets(base, mean.shape[2])]


@dataclass(frozen=True)
class LinearOffset:
    """Ridge regression from a token's base [K, V] to what its context adds, with a mean for each pair and bucket.

    One map per layer and KV head is fitted on all pairs together, on deviations from each (pair, bucket)'s mean. A pair
    seen in few calls leans on the mean over all pairs.

    Attributes:
        ridge: added to the diagonal of the centred Σxxᵀ, as a fraction of its mean diagonal.
        prior_calls: weight, in calls, of the mean over all pairs against the pair's own.
    """

    ridge: float = 0.03
    prior_calls: float = 0.5

    def solve(self, statistics: OffsetStatistics) -> Predictor | None:
        if not statistics.pairs:
            return None
        weights = _ridge_map(statistics, self.ridge)
        total = total_sums(statistics.pairs, statistics)
        global_x, global_y = _mean(total, total.x), _mean(total, total.y)
        intercept = global_y - global_x @ weights
        intercepts = {}
        for pair, sums in statistics.pairs.items():
            n = sums.tokens.shape[0]
            own = _mean(sums, sums.y) - _mean(sums, sums.x) @ weights
            trust = (sums.calls / (sums.calls + self.prior_calls)).float()[:, None]
            intercepts[pair] = trust * own + (1 - trust) * intercept[:, :, :n]
        return LinearPredictor(weights, intercept, intercepts)


@dataclass(frozen=True)
class LinearPredictor:
    """weights [layers - 1, heads, F, F]; intercepts [layers - 1, heads, buckets, F], for all pairs and for each.

    What a GPU has been sent stays there for as long as the predictor lives: at most as much again as is held here.
    """

    weights: torch.Tensor
    intercept: torch.Tensor
    intercepts: Mapping[Pair, torch.Tensor]
    _sent: dict[tuple[Pair | str, torch.device], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def map(self, pair: Pair, base: SegmentKV, factor: torch.Tensor) -> LinearMap:
        """The offset of ``base`` used at ``pair.used`` as a map to be applied where the base is moved.

        Args:
            factor: shrinkage, [layers - 1, 2] for keys and values.
        """
        device = base.device
        intercept = self._intercept(pair, device)
        scale = factor.to(device=device, dtype=torch.float32).contiguous()
        weights = self._rounded if device.type == "cpu" and _bfloat16_is_fast() else self._weights(device)
        return LinearMap(weights, intercept, _buckets(base, intercept.shape[2]), scale)

    @cached_property
    def _rounded(self) -> torch.Tensor:
        return self.weights.bfloat16()

    def predict(self, pair: Pair, base: SegmentKV) -> torch.Tensor | None:
        x = features(base).float()
        intercept = self._intercept(pair, x.device)
        add = intercept[:, :, _buckets(base, intercept.shape[2])]
        layers, heads, tokens, width = x.shape
        weights = self._weights(x.device)
        out = torch.baddbmm(
            add.reshape(layers * heads, tokens, width), x.reshape(-1, tokens, width), weights.reshape(-1, width, width)
        )
        return out.reshape(x.shape)

    def _weights(self, device: torch.device) -> torch.Tensor:
        if device == self.weights.device:
            return self.weights
        key = ("weights", device)
        if key not in self._sent:  # by columns, as tensor cores want it
            self._sent[key] = self.weights.to(device).mT.contiguous().mT
        return self._sent[key]

    def _intercept(self, pair: Pair, device: torch.device) -> torch.Tensor:
        known = pair in self.intercepts
        intercept = self.intercepts[pair] if known else self.intercept
        if device == intercept.device:
            return intercept
        key = (pair if known else "all pairs", device)
        if key not in self._sent:
            self._sent[key] = intercept.to(device)
        return self._sent[key]


@cache
def _bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 matrices itself: four times the speed of float32 here."""
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))


def _buckets(base: SegmentKV, known: int) -> torch.Tensor:
    """Bucket of each token; those beyond every bucket that was observed share the last."""
    return bucket_of(torch.arange(len(base), device=base.device)).clamp_max(known - 1)


def _mean(sums: PairSums, of: torch.Tensor) -> torch.Tensor:
    """Per-bucket mean, float32; a bucket that saw nothing takes the one before it."""
    mean = of / sums.tokens.clamp_min(1)[:, None]
    last = torch.arange(len(sums.tokens)).where(sums.tokens > 0, torch.tensor(0)).cummax(0).values
    return mean[:, :, last].float()


def _ridge_map(statistics: OffsetStatistics, ridge: float) -> torch.Tensor:
    """W of y = x W minimising the squared error of deviations from each (pair, bucket) mean, float32."""
    x = torch.cat([s.x / s.tokens.clamp_min(1).sqrt()[:, None] for s in statistics.pairs.values()], dim=2)
    y = torch.cat([s.y / s.tokens.clamp_min(1).sqrt()[:, None] for s in statistics.pairs.values()], dim=2)
    xx = statistics.xx - x.transpose(2, 3) @ x
    xy = statistics.xy - x.transpose(2, 3) @ y
    scale = xx.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    xx = xx + (ridge * scale)[..., None, None] * torch.eye(statistics.width, dtype=xx.dtype)
    solved: torch.Tensor = torch.linalg.solve(xx, xy)
    return solved.float()
