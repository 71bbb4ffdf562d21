"""How far a predicted offset is expected to be off, token by token, from the same sums that predict it.

For a token x of bucket b of a pair, least squares has E|y - ŷ|² = s²(1 + 1/n_b + h): s² is the residual variance, n_b
the tokens seen in the bucket, h = (x - x̄_b)ᵀ (XXᵀ + λ)⁻¹ (x - x̄_b), at most 1 here, the token's leverage under the
shared map. Residuals are far from alike: those at the start of a segment are many times larger. So s² is taken by pair
and bucket, for each layer, head, and keys and values apart: the variance of y about the bucket's mean, times the part
of it that the shared map left unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcomm.anchors.statistics import OffsetStatistics, Pair, PairSums, bucket_of, features, total_sums
from kvcomm.types import SegmentKV

# Weight, in tokens, of the variance over all pairs against a pair's own.
_PRIOR_TOKENS = 4.0


@dataclass(frozen=True)
class BucketErrors:
    """Expectations by bucket.

    Attributes:
        mean: of x, [layers - 1, heads, buckets, F] float32.
        noise: expected squared residual, summed over dK and dV apart, [layers - 1, heads, buckets, 2] float32.
        few: 1/n_b, the bucket's own uncertainty in units of noise, [buckets] float32.
    """

    mean: torch.Tensor
    noise: torch.Tensor
    few: torch.Tensor


@dataclass(frozen=True)
class OffsetErrors:
    """Statistics solved for expected errors; constant.

    Attributes:
        whiten: its product with x - x̄ has the leverage for its squared length, [layers - 1, heads, F, F] float32.
        scale: mean squared y over all that was seen, [layers - 1, heads, 2]: what errors are measured in.
        pairs: by pair.
        other: for a pair never seen; its noise is the spread about the mean over all pairs.
        plain: mean squared y by bucket, [layers - 1, heads, buckets, 2]: the error where no offset is applied.
    """

    whiten: torch.Tensor
    scale: torch.Tensor
    pairs: Mapping[Pair, BucketErrors]
    other: BucketErrors
    plain: torch.Tensor

    def expect(self, pair: Pair | None, base: SegmentKV) -> torch.Tensor:
        """Expected squared error of each token's spliced KV, [T] float32.

        In units of the mean squared offset of its layer, head and kind (keys, values), averaged over these: 1 is as far
        off as an average token without any offset.

        Args:
            pair: whose offset is added, or None where none is.
            base: unrotated KV, [n_layers, n_kv_heads, T, head_dim].
        """
        device = base.keys.device
        index = bucket_of(torch.arange(len(base), device=device))
        scale = self.scale.to(device)[:, :, None]
        if pair is None:
            plain = self.plain.to(device)
            return (plain[:, :, index.clamp_max(plain.shape[2] - 1)] / scale).mean((0, 1, 3))
        known = self.pairs.get(pair, self.other)
        bucket = index.clamp_max(known.few.shape[0] - 1)
        away = features(base).float() - known.mean.to(device)[:, :, bucket]
        leverage = (away @ self.whiten.to(device).transpose(-1, -2)).square().sum(-1, keepdim=True).clamp_max(1.0)
        noise = known.noise.to(device)[:, :, bucket] / scale
        return (noise * (1.0 + known.few.to(device)[bucket][:, None] + leverage)).mean((0, 1, 3))


def solve_errors(statistics: OffsetStatistics, ridge: float) -> OffsetErrors | None:
    """Expected errors from what was observed, or None while that is nothing.

    Args:
        ridge: of the linear map, as in LinearOffset.
    """
    if not statistics.pairs:
        return None
    total = total_sums(statistics.pairs, statistics)
    whiten, unexplained = _shared_map(statistics, ridge)
    freedom = torch.zeros_like(total.tokens)
    spread = torch.zeros_like(total.squares)
    for sums in statistics.pairs.values():
        n = sums.tokens.shape[0]
        freedom[:n] += (sums.tokens - 1).clamp_min(0)
        spread[:, :, :n] += _about_mean(sums)
    # Where no pair saw a bucket twice, the spread over all pairs is the best there is.
    common = torch.where((freedom > 0)[:, None], spread / freedom.clamp_min(1)[:, None], _total_variance(total))
    pairs = {}
    for pair, sums in statistics.pairs.items():
        n = sums.tokens.shape[0]
        own = (_about_mean(sums) + _PRIOR_TOKENS * common[:, :, :n]) / ((sums.tokens - 1).clamp_min(0) + _PRIOR_TOKENS)[
            :, None
        ]
        pairs[pair] = _bucket_errors(sums, own * unexplained[:, :, None])
    other = _bucket_errors(total, _total_variance(total) * unexplained[:, :, None])
    counted = total.tokens.sum().clamp_min(1)
    scale = (total.squares.sum(2) / counted).clamp_min(1e-30)
    plain = _carried(total.squares / total.tokens.clamp_min(1)[:, None], total)
    return OffsetErrors(whiten, scale.float(), pairs, other, plain.float())


def _about_mean(sums: PairSums) -> torch.Tensor:
    """Σ|y - ȳ_b|² by bucket, keys and values apart: [layers - 1, heads, buckets, 2]."""
    return (sums.squares - _halves(sums.y.square()) / sums.tokens.clamp_min(1)[:, None]).clamp_min(0)


def _halves(values: torch.Tensor) -> torch.Tensor:
    """Sums over the features of keys and over those of values: [..., F] to [..., 2]."""
    keys = values.shape[-1] // 2
    return torch.stack([values[..., :keys].sum(-1), values[..., keys:].sum(-1)], dim=-1)


def _total_variance(total: PairSums) -> torch.Tensor:
    """Mean |y - ȳ_b|² about the mean over all pairs; of a bucket seen once |y|² itself."""
    once = (total.tokens <= 1)[:, None]
    return torch.where(once, total.squares, _about_mean(total) / (total.tokens - 1).clamp_min(1)[:, None])


def _bucket_errors(sums: PairSums, noise: torch.Tensor) -> BucketErrors:
    mean = _carried(sums.x / sums.tokens.clamp_min(1)[:, None], sums)
    few = 1.0 / sums.tokens.clamp_min(1)
    return BucketErrors(mean.float(), _carried(noise, sums).float(), few.float())


def _carried(by_bucket: torch.Tensor, sums: PairSums) -> torch.Tensor:
    """A bucket that saw nothing takes what the one before it has."""
    last = torch.arange(len(sums.tokens)).where(sums.tokens > 0, torch.tensor(0)).cummax(0).values
    return by_bucket[:, :, last]


def _shared_map(statistics: OffsetStatistics, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitening of x, [layers - 1, heads, F, F], and the part of y's variance left by the ridge map, [.., heads, 2]."""
    roots = [s.tokens.clamp_min(1).sqrt()[:, None] for s in statistics.pairs.values()]
    x = torch.cat([s.x / root for s, root in zip(statistics.pairs.values(), roots, strict=True)], dim=2)
    y = torch.cat([s.y / root for s, root in zip(statistics.pairs.values(), roots, strict=True)], dim=2)
    xx = statistics.xx - x.transpose(2, 3) @ x
    xy = statistics.xy - x.transpose(2, 3) @ y
    yy = (statistics.yy - y.square().sum(2)).clamp_min(0)
    size = xx.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    eye = torch.eye(statistics.width, dtype=xx.dtype)
    regular = xx + (ridge * size)[..., None, None] * eye
    lower = torch.linalg.cholesky(regular)
    weights = torch.cholesky_solve(xy, lower)
    left = yy - (2 * weights * xy).sum(2) + (weights * (xx @ weights)).sum(2)
    unexplained = (_halves(left.clamp_min(0)) / _halves(yy).clamp_min(1e-30)).clamp(0.0, 1.0)
    return torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).float(), unexplained
