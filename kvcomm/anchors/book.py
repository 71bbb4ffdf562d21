"""The offset book: predicts offsets, tests each prediction against what was observed, and only then learns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcomm.anchors.offset import LinearOffset, OffsetEstimator, Predictor
from kvcomm.anchors.statistics import OffsetStatistics, Pair, check_observation, features
from kvcomm.anchors.variance import OffsetErrors, solve_errors
from kvcomm.types import ModelFingerprint, SegmentKV


@dataclass(frozen=True)
class Observation:
    """A base, where it was used, and the KV that a dense run had there; both unrotated, one shape."""

    pair: Pair
    base: SegmentKV
    true: SegmentKV


class Gain:
    """Running test of predictions made before learning, per layer and for keys and values apart ([layers - 1, 2]).

    ``factor`` is the least-squares shrinkage of the prediction: 1 where it was right, 0 where it would have harmed.
    """

    def __init__(self, layers: int) -> None:
        self.calls = 0
        self.agreement = torch.zeros(layers, 2, dtype=torch.float64)
        self.predicted = torch.zeros(layers, 2, dtype=torch.float64)
        self.observed = torch.zeros(layers, 2, dtype=torch.float64)

    def test(self, predicted: torch.Tensor, observed: torch.Tensor) -> None:
        """Compare one prediction with what was observed, both [layers - 1, heads, T, 2 * head_dim]."""

        def per_layer(product: torch.Tensor) -> torch.Tensor:
            keys, values = product.double().chunk(2, dim=-1)
            return torch.stack([keys.sum((1, 2, 3)), values.sum((1, 2, 3))], dim=-1).cpu()

        self.calls += 1
        self.agreement += per_layer(predicted * observed)
        self.predicted += per_layer(predicted * predicted)
        self.observed += per_layer(observed * observed)

    def add(self, other: Gain) -> None:
        """Merge another's tests."""
        self.calls += other.calls
        self.agreement += other.agreement
        self.predicted += other.predicted
        self.observed += other.observed

    @property
    def factor(self) -> torch.Tensor:
        """Shrinkage to apply, [layers - 1, 2] in 0 to 1."""
        return (self.agreement / self.predicted.clamp_min(1e-30)).clamp(0.0, 1.0)

    @property
    def explained(self) -> float:
        """Share of the squared offset that shrunk predictions explained; 0 when they were of no use."""
        total = float(self.observed.sum())
        removed = (2 * self.factor * self.agreement - self.factor**2 * self.predicted).sum()
        return float(removed) / total if total > 0 else 0.0


class OffsetBook:
    """Offsets of one namespace and fingerprint: statistics, an estimator and its running gain."""

    def __init__(self, fingerprint: ModelFingerprint, estimator: OffsetEstimator | None = None) -> None:
        self.fingerprint = fingerprint
        self.estimator: OffsetEstimator = estimator or LinearOffset()
        f = fingerprint
        self.statistics = OffsetStatistics(f.n_layers, f.n_kv_heads, f.head_dim)
        self.gains: dict[Pair, Gain] = {}
        self._solved: tuple[int, OffsetEstimator, Predictor | None] | None = None
        self._errors: tuple[int, OffsetErrors | None] | None = None

    def learn(self, observations: Sequence[Observation]) -> None:
        """Test the present predictor on all observations, then add them.

        Raises:
            InvalidInput: a base and its true KV differ in shape or hold NaN or infinity; nothing was learned.
        """
        for seen in observations:
            check_observation(seen.base, seen.true)
        predictor = self.predictor()
        for seen in observations:
            predicted = predictor.predict(seen.pair, seen.base) if predictor else None
            self.statistics.observe(seen.pair, seen.base, seen.true)
            if predicted is not None:
                gain = self.gains.setdefault(seen.pair, Gain(self.statistics.layers))
                gain.test(predicted, features(seen.true).float() - features(seen.base).float())

    def predictor(self) -> Predictor | None:
        """The estimator solved for the present statistics; solved again only when they changed."""
        version = self.statistics.version
        if self._solved is None or self._solved[0] != version or self._solved[1] is not self.estimator:
            self._solved = (version, self.estimator, self.estimator.solve(self.statistics))
        return self._solved[2]

    def estimate(self, pair: Pair, base: SegmentKV) -> SegmentKV | None:
        """Shrunk offset of ``base`` used at ``pair.used``, or None where none would help.

        A pair that was never tested takes the gain over all pairs together.

        Returns:
            offset in the base's shape and dtype, unrotated; layer 0 is zero.
        """
        predictor = self.predictor()
        if predictor is None or len(base) == 0:
            return None
        factor = self._factor(pair)
        if factor is None or float(factor.max()) <= 0:
            return None
        offset = predictor.predict(pair, base)
        if offset is None:
            return None
        keys, values = offset.chunk(2, dim=-1)
        scale = factor.to(device=offset.device, dtype=offset.dtype)[:, :, None, None, None]
        return SegmentKV(_with_first(keys * scale[:, 0], base), _with_first(values * scale[:, 1], base))

    def errors(self) -> OffsetErrors | None:
        """Expected errors of offsets under the present statistics, or None while nothing was observed."""
        version = self.statistics.version
        if self._errors is None or self._errors[0] != version:
            ridge = self.estimator.ridge if isinstance(self.estimator, LinearOffset) else LinearOffset().ridge
            self._errors = (version, solve_errors(self.statistics, ridge))
        return self._errors[1]

    def _factor(self, pair: Pair) -> torch.Tensor | None:
        gain = self.gains.get(pair)
        if gain is None:
            gain = Gain(self.statistics.layers)
            for other in self.gains.values():
                gain.add(other)
        return gain.factor if gain.calls else None

    def calls(self, label: str) -> int:
        """How many calls were observed of bases used at ``label``."""
        pairs = (sums for pair, sums in self.statistics.pairs.items() if pair.used == label)
        return int(sum(float(sums.calls.max()) for sums in pairs if len(sums.calls)))

    def explained(self, pair: Pair) -> float:
        """Share of the squared offset that predictions for ``pair`` explained so far; 0 if never tested."""
        gain = self.gains.get(pair)
        return gain.explained if gain else 0.0


def _with_first(later: torch.Tensor, base: SegmentKV) -> torch.Tensor:
    out = torch.zeros_like(base.keys)
    out[1:] = later
    return out
