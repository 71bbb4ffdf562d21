"""How far a predicted offset is expected to be off, by place, from the same sums that predict it.

For a token of bucket b of a pair, least squares has E|y - ŷ|² = s²(1 + 1/n_b + h): s² is the residual variance, n_b the
tokens seen in the bucket, h the token's leverage under the shared map. Residuals are far from alike: those at the start
of a segment, and of some places, are many times larger. So s² is taken by pair and bucket, for each layer, head, keys
and values: the variance of y about the bucket's mean, times the part of it that the shared map left unexplained.
Leverage is left out: over tokens of real prompts it changed the order by less than could be told, and cost a matrix
product a token (docs/methods.md). What is left is a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcomm.anchors.statistics import OffsetStatistics, Pair, PairSums, bucket_of, total_sums

# Weight, in tokens, of the variance over all pairs against a pair's own.
_PRIOR_TOKENS = 4.0


@dataclass(frozen=True)
class OffsetErrors:
    """Expected squared errors of spliced KV by bucket, [buckets] float32; constant.

    In units of the mean squared key, or value, of the layer, averaged over layers and over keys and values.

    Attributes:
        pairs: where the pair's offset is added.
        other: the same for a pair never seen; its noise is the spread about the mean over all pairs.
        plain: where no offset is added.
    """

    pairs: Mapping[Pair, torch.Tensor]
    other: torch.Tensor
    plain: torch.Tensor

    def expect(self, pair: Pair | None, tokens: int) -> torch.Tensor:
        """Of each token of a segment of ``tokens`` tokens, [tokens] float32.

        Args:
            pair: whose offset is added, or None where none is.
        """
        known = self.plain if pair is None else self.pairs.get(pair, self.other)
        return known[bucket_of(torch.arange(tokens)).clamp_max(len(known) - 1)]


def solve_errors(statistics: OffsetStatistics, ridge: float) -> OffsetErrors | None:
    """Expected errors from what was observed, or None while that is nothing.

    Args:
        ridge: of the linear map, as in LinearOffset.
    """
    if not statistics.pairs:
        return None
    total = total_sums(statistics.pairs, statistics)
    unexplained = _unexplained(statistics, ridge)
    freedom = torch.zeros_like(total.tokens)
    spread = torch.zeros_like(total.squares)
    for sums in statistics.pairs.values():
        n = sums.tokens.shape[0]
        freedom[:n] += (sums.tokens - 1).clamp_min(0)
        spread[:, :, :n] += _about_mean(sums)
    # Where no pair saw a bucket twice, the spread over all pairs is the best there is.
    common = torch.where((freedom > 0)[:, None], spread / freedom.clamp_min(1)[:, None], _total_variance(total))
    # Mean squared keys and values of a layer, all heads together: what errors are measured in, [layers - 1, 1, 1, 2].
    squares = _halves(statistics.xx.diagonal(dim1=-2, dim2=-1)) / total.tokens.sum().clamp_min(1)
    unit = squares.sum(1)[:, None, None].clamp_min(1e-30)

    def by_bucket(sums: PairSums, noise: torch.Tensor) -> torch.Tensor:
        off = (noise / unit).sum(1).mean((0, 2)) * (1.0 + 1.0 / sums.tokens.clamp_min(1))
        return _carried(off, sums).float()

    pairs = {}
    for pair, sums in statistics.pairs.items():
        n = sums.tokens.shape[0]
        seen = (sums.tokens - 1).clamp_min(0)[:, None]
        own = (_about_mean(sums) + _PRIOR_TOKENS * common[:, :, :n]) / (seen + _PRIOR_TOKENS)
        pairs[pair] = by_bucket(sums, own * unexplained[:, :, None])
    other = by_bucket(total, _total_variance(total) * unexplained[:, :, None])
    plain = (total.squares / total.tokens.clamp_min(1)[:, None] / unit).sum(1).mean((0, 2))
    return OffsetErrors(pairs, other, _carried(plain, total).float())


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


def _carried(by_bucket: torch.Tensor, sums: PairSums) -> torch.Tensor:
    """A bucket that saw nothing takes what the one before it has; the buckets are the only axis."""
    last = torch.arange(len(sums.tokens)).where(sums.tokens > 0, torch.tensor(0)).cummax(0).values
    return by_bucket[last]


def _unexplained(statistics: OffsetStatistics, ridge: float) -> torch.Tensor:
    """The part of y's variance about its buckets' means that the ridge map leaves, [layers - 1, heads, 2]."""
    roots = [s.tokens.clamp_min(1).sqrt()[:, None] for s in statistics.pairs.values()]
    x = torch.cat([s.x / root for s, root in zip(statistics.pairs.values(), roots, strict=True)], dim=2)
    y = torch.cat([s.y / root for s, root in zip(statistics.pairs.values(), roots, strict=True)], dim=2)
    xx = statistics.xx - x.transpose(2, 3) @ x
    xy = statistics.xy - x.transpose(2, 3) @ y
    yy = (statistics.yy - y.square().sum(2)).clamp_min(0)
    size = xx.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    regular = xx + (ridge * size)[..., None, None] * torch.eye(statistics.width, dtype=xx.dtype)
    weights = torch.linalg.solve(regular, xy)
    left = yy - (2 * weights * xy).sum(2) + (weights * (xx @ weights)).sum(2)
    return (_halves(left.clamp_min(0)) / _halves(yy).clamp_min(1e-30)).clamp(0.0, 1.0)
