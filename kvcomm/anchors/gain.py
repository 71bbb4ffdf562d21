"""The running test of an estimator: each prediction is compared with what was observed before it is learned."""

from __future__ import annotations

import torch


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

    def age(self, weight: float) -> None:
        """Let all tests so far count ``weight`` (0 to 1) times."""
        self.agreement *= weight
        self.predicted *= weight
        self.observed *= weight

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
