"""How close one run is to another: pure functions on logits and tokens (docs/methods.md says how they are averaged)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcomm.errors import InvalidInput


def _check(dense: torch.Tensor, other: torch.Tensor) -> None:
    if dense.dim() != 2 or dense.shape != other.shape or dense.shape[0] == 0:
        raise InvalidInput(
            f"logits {tuple(dense.shape)} and {tuple(other.shape)} must have one shape [tokens >= 1, vocabulary]"
        )


def kl_divergence(dense: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(dense ‖ other) in nats for each position, computed in float64.

    Args:
        dense: logits of the dense run, [tokens, vocabulary].
        other: logits of the run under test, teacher-forced on the same tokens, [tokens, vocabulary].

    Returns:
        [tokens] float64, never negative beyond rounding.
    """
    _check(dense, other)
    p = torch.log_softmax(dense.double(), dim=-1)
    q = torch.log_softmax(other.double(), dim=-1)
    return torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1)  # what dense forbids adds nothing


def top1_agreement(dense: torch.Tensor, other: torch.Tensor) -> float:
    """Fraction of positions at which both runs rank the same token first; shapes as in kl_divergence."""
    _check(dense, other)
    return float((dense.argmax(-1) == other.argmax(-1)).double().mean())


def common_run(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two generated sequences share."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def is_tie(logits: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether the two best of ``logits`` [vocabulary] lie closer than ``tolerance``: the promise's only exception."""
    best = logits.double().topk(2).values
    return bool(best[0] - best[1] < tolerance)
