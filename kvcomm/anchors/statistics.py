"""What was observed of offsets, as sums: fixed in size, updated online, and added across processes.

In the unrotated frame, an observation is a token's base x = [K, V] and what its context added y = [dK, dV], for each
layer but the first and each KV head. Raw float64 sums are kept; centring is done when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch

from kvcomm.errors import InvalidInput
from kvcomm.types import SegmentKV, digest_fields

_SINGLE = 16  # the first tokens of a segment have a bucket each: what the context adds changes fastest there
_PER_OCTAVE = 4


def bucket_of(index: torch.Tensor) -> torch.Tensor:
    """Bucket of each token index within its segment (int64): one each to 15, then four an octave."""
    far = _SINGLE + (torch.log2(index.clamp_min(_SINGLE).double() / _SINGLE) * _PER_OCTAVE).floor().long()
    return torch.where(index < _SINGLE, index, far)


def bucket_count(tokens: int) -> int:
    """Number of buckets that segments of up to ``tokens`` tokens touch."""
    return int(bucket_of(torch.tensor([max(tokens, 1) - 1]))[0]) + 1


@dataclass(frozen=True)
class Pair:
    """Where a base was captured and where it is used; an offset belongs to the two together.

    Attributes:
        origin: kind of the base, ``prompt``, ``decode`` or ``isolated``.
        captured: label of the place of capture, ``agent/slot``.
        used: label of the place of use.
    """

    origin: str
    captured: str
    used: str

    def __str__(self) -> str:
        return f"{self.origin}:{self.captured}->{self.used}"


def features(kv: SegmentKV) -> torch.Tensor:
    """Keys and values of all layers but the first, side by side: [n_layers - 1, n_kv_heads, T, 2 * head_dim]."""
    return torch.cat([kv.keys[1:], kv.values[1:]], dim=-1)


def check_observation(base: SegmentKV, true: SegmentKV) -> None:
    """Raise InvalidInput where the two differ in shape or hold NaN or infinity behind the first layer."""
    if base.keys.shape != true.keys.shape:
        raise InvalidInput(f"base {tuple(base.keys.shape)} and true KV {tuple(true.keys.shape)} differ in shape")
    sums = (float(part[1:].sum(dtype=torch.float64)) for kv in (base, true) for part in (kv.keys, kv.values))
    if not all(map(math.isfinite, sums)):
        raise InvalidInput("base or true KV holds NaN or infinity; nothing was learned from it")


class PairSums:
    """Per bucket of token index: calls, tokens, sum of x and sum of y (both [layers - 1, heads, buckets, F]).

    ``squares`` is the sum of squared y, added up over dK and over dV: [layers - 1, heads, buckets, 2].
    """

    def __init__(self, layers: int, heads: int, width: int) -> None:
        self.calls = torch.zeros(0, dtype=torch.float64)
        self.tokens = torch.zeros(0, dtype=torch.float64)
        self.x = torch.zeros(layers, heads, 0, width, dtype=torch.float64)
        self.y = torch.zeros(layers, heads, 0, width, dtype=torch.float64)
        self.squares = torch.zeros(layers, heads, 0, 2, dtype=torch.float64)

    def grow(self, buckets: int) -> None:
        """Make room for ``buckets`` buckets."""
        extra = buckets - self.tokens.shape[0]
        if extra > 0:
            self.calls = torch.cat([self.calls, self.calls.new_zeros(extra)])
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(extra)])
            shape = (*self.x.shape[:2], extra, self.x.shape[3])
            self.x = torch.cat([self.x, self.x.new_zeros(shape)], dim=2)
            self.y = torch.cat([self.y, self.y.new_zeros(shape)], dim=2)
            self.squares = torch.cat([self.squares, self.squares.new_zeros((*shape[:3], 2))], dim=2)

    def add(self, other: PairSums) -> None:
        """Add another's sums to these."""
        self.grow(other.tokens.shape[0])
        n = other.tokens.shape[0]
        self.calls[:n] += other.calls
        self.tokens[:n] += other.tokens
        self.x[:, :, :n] += other.x
        self.y[:, :, :n] += other.y
        self.squares[:, :, :n] += other.squares

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name."""
        return {"calls": self.calls, "tokens": self.tokens, "x": self.x, "y": self.y, "squares": self.squares}


class OffsetStatistics:
    """Sums over observed (base, offset) pairs of one namespace and fingerprint.

    Per pair and bucket: calls, tokens, Σx, Σy. Over everything: Σxxᵀ, Σxyᵀ ([layers - 1, heads, F, F]) and Σy²
    ([layers - 1, heads, F]), with F = 2 * head_dim. Sums from several processes merge by addition.
    """

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        if n_layers < 1:
            raise InvalidInput(f"a model of {n_layers} layers has no KV")
        self.layers, self.heads, self.width = n_layers - 1, n_kv_heads, 2 * head_dim
        square = (self.layers, self.heads, self.width, self.width)
        self.xx = torch.zeros(square, dtype=torch.float64)
        self.xy = torch.zeros(square, dtype=torch.float64)
        self.yy = torch.zeros(square[:3], dtype=torch.float64)
        self.pairs: dict[Pair, PairSums] = {}
        self.version = 0

    def observe(self, pair: Pair, base: SegmentKV, true: SegmentKV) -> None:
        """Add one segment's observation; ``true`` is its KV in the context ``pair.used``, shapes as ``base``.

        Raises:
            InvalidInput: shapes differ or hold NaN or infinity; nothing was added.
        """
        check_observation(base, true)
        x = features(base).double()
        y = features(true).double() - x
        tokens = x.shape[2]
        if tokens == 0:
            return
        buckets = bucket_of(torch.arange(tokens)).to(x.device)
        sums = PairSums(self.layers, self.heads, self.width)
        sums.grow(bucket_count(tokens))
        sums.tokens.index_add_(0, buckets.cpu(), torch.ones(tokens, dtype=torch.float64))
        sums.calls = (sums.tokens > 0).double()
        sums.x.index_add_(2, buckets.cpu(), x.cpu())
        sums.y.index_add_(2, buckets.cpu(), y.cpu())
        squares = torch.stack([half.square().sum(-1) for half in y.chunk(2, dim=-1)], dim=-1)
        sums.squares.index_add_(2, buckets.cpu(), squares.cpu())
        self.pairs.setdefault(pair, PairSums(self.layers, self.heads, self.width)).add(sums)
        self.xx += (x.transpose(2, 3) @ x).cpu()
        self.xy += (x.transpose(2, 3) @ y).cpu()
        self.yy += (y * y).sum(2).cpu()
        self.version += 1

    def merge(self, other: OffsetStatistics) -> None:
        """Add another process's sums; the same observations must not be merged twice.

        Raises:
            InvalidInput: the two belong to differently shaped models.
        """
        if (self.layers, self.heads, self.width) != (other.layers, other.heads, other.width):
            raise InvalidInput("statistics of differently shaped models cannot be merged")
        for pair, sums in other.pairs.items():
            self.pairs.setdefault(pair, PairSums(self.layers, self.heads, self.width)).add(sums)
        self.xx += other.xx
        self.xy += other.xy
        self.yy += other.yy
        self.version += 1

    def forget(self, label: str) -> int:
        """Drop the means of every pair captured or used at ``label``; returns how many.

        What they taught the shared map stays in its sums, as deviations from the means that are gone: raw sums without
        their means could not be centred any more.
        """
        gone = [p for p in self.pairs if label in (p.captured, p.used)]
        for pair in gone:
            self.drop(pair)
        return len(gone)

    def drop(self, pair: Pair) -> None:
        """Drop one pair's means, which must be there; see forget."""
        self._weigh(self.pairs.pop(pair), torch.tensor(0.0, dtype=torch.float64))
        self.version += 1

    def age(self, pair: Pair, weight: float) -> None:
        """Let what was observed of a pair, which must be there, count as ``weight`` (0 to 1) times as many tokens.

        Its means stay and move faster from now on; a bucket keeps the weight of one token. What it taught the shared
        map stays: the shared sums lose just the part of the means that centring will no longer take off.
        """
        sums = self.pairs[pair]
        calls = sums.calls * weight
        self._weigh(sums, (1.0 / sums.tokens.clamp_min(1)).clamp_min(weight))
        sums.calls = calls
        self.version += 1

    def _weigh(self, sums: PairSums, weight: torch.Tensor) -> None:
        """Multiply a pair's sums, and their part of the shared ones, by ``weight``, one or one a bucket."""
        lost = ((1.0 - weight) / sums.tokens.clamp_min(1)).sqrt()[:, None]
        x, y = sums.x * lost, sums.y * lost
        self.xx -= x.transpose(2, 3) @ x
        self.xy -= x.transpose(2, 3) @ y
        self.yy -= (y * y).sum(2)
        sums.tokens = sums.tokens * weight
        sums.x, sums.y, sums.squares = (held * weight[..., None] for held in (sums.x, sums.y, sums.squares))

    @property
    def nbytes(self) -> int:
        """Bytes held by all sums."""
        return self.xx.nbytes + self.xy.nbytes + self.yy.nbytes + sum(p.nbytes for p in self.pairs.values())

    def digest(self) -> str:
        """SHA-256 hex digest over every sum: equal before and after a frozen measurement."""
        parts = [self.xx, self.xy, self.yy]
        names = []
        for pair in sorted(self.pairs, key=astuple):
            sums = self.pairs[pair]
            names += [name.encode() for name in astuple(pair)]
            parts += [sums.calls, sums.tokens, sums.x, sums.y, sums.squares]
        return digest_fields(*names, *(p.contiguous().numpy().tobytes() for p in parts))


def total_sums(pairs: Mapping[Pair, PairSums], like: OffsetStatistics) -> PairSums:
    """The sums of all pairs together."""
    total = PairSums(like.layers, like.heads, like.width)
    for sums in pairs.values():
        total.add(sums)
    return total
