"""Closeness measures against values worked out by hand and against torch's own kl_div."""

from __future__ import annotations

import math

import pytest
import torch

from kvcomm.closeness import common_run, is_tie, kl_divergence, top1_agreement
from kvcomm.errors import InvalidInput


def logits(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax are the given probabilities, moved by a constant that softmax takes off again."""
    return torch.tensor(rows, dtype=torch.float64).log() + 3.0


def test_kl_by_hand() -> None:
    dense, other = logits([0.5, 0.5], [0.25, 0.75]), logits([0.25, 0.75], [0.25, 0.75])
    by_hand = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_divergence(dense, other).tolist() == pytest.approx([by_hand, 0.0], abs=1e-15)
    assert by_hand != pytest.approx(float(kl_divergence(other, dense)[0]))  # it has a direction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kl_is_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    dense, other = (torch.randn(7, 50, generator=generator).mul(4).to(dtype) for _ in range(2))
    oracle = torch.nn.functional.kl_div(
        other.double().log_softmax(-1), dense.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    found = kl_divergence(dense, other)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, oracle, rtol=1e-12, atol=1e-12)
    assert bool((found > 0).all())


def test_tokens_that_both_runs_forbid_add_nothing() -> None:
    dense, other = logits([0.5, 0.5, 0.0]), logits([0.25, 0.75, 0.0])
    assert torch.isinf(dense[0, 2])
    torch.testing.assert_close(kl_divergence(dense, other), kl_divergence(dense[:, :2], other[:, :2]))
    assert kl_divergence(logits([0.5, 0.5]), logits([1.0, 0.0])).tolist() == [math.inf]
    assert kl_divergence(logits([1.0, 0.0]), logits([0.5, 0.5])).tolist() == pytest.approx([math.log(2)])


def test_top1_by_hand() -> None:
    dense = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 3.0], [5.0, 4.0]])
    other = torch.tensor([[0.0, 9.0], [0.0, 1.0], [2.5, 2.6], [0.0, 1.0]])
    assert top1_agreement(dense, other) == 0.5
    assert top1_agreement(dense, dense) == 1.0


@pytest.mark.parametrize(
    ("a", "b", "run"),
    [([], [], 0), ([1], [], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([5, 1], [6, 1], 0)],
)
def test_common_run(a: list[int], b: list[int], run: int) -> None:
    assert common_run(a, b) == common_run(b, a) == run


def test_ties() -> None:
    assert is_tie(torch.tensor([1.0, 5.0, 5.00005]))
    assert not is_tie(torch.tensor([1.0, 5.0, 5.001]))
    assert is_tie(torch.tensor([5.0, 5.001]), tolerance=0.01)
    assert not is_tie(torch.tensor([1.0, 1.0, 2.0]))  # only the two best count


@pytest.mark.parametrize("shapes", [((3, 4), (4, 4)), ((3, 4), (3, 5)), ((4,), (4,)), ((0, 4), (0, 4))])
@pytest.mark.parametrize("measure", [kl_divergence, top1_agreement])
def test_shapes_are_checked(measure: object, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(InvalidInput, match="must have one shape"):
        measure(*(torch.zeros(shape) for shape in shapes))  # type: ignore[operator]
