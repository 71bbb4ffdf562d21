"""Expected errors of offsets: by hand, against textbook formulas, and in the right order on made-up noise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcomm.anchors.statistics import OffsetStatistics, Pair
from kvcomm.anchors.variance import solve_errors
from kvcomm.types import SegmentKV

PAIR, OTHER = Pair("isolated", "", "a/x"), Pair("isolated", "", "a/y")


def kv(x: torch.Tensor) -> SegmentKV:
    """[T, 2 * dim] as KV of two layers and one head, the first layer zero."""
    keys, values = x.chunk(2, dim=-1)
    both = torch.stack([keys, values])[:, None, None].expand(2, 2, 1, -1, -1).clone()
    both[:, 0] = 0
    return SegmentKV(both[0], both[1])


def observed(pairs: Iterator[tuple[Pair, torch.Tensor, torch.Tensor]]) -> OffsetStatistics:
    """Statistics of (pair, x, y), each [T, 2 * dim]."""
    found = None
    for pair, x, y in pairs:
        found = found or OffsetStatistics(2, 1, x.shape[1] // 2)
        found.observe(pair, kv(x), kv(x + y))
    assert found is not None
    return found


def test_by_hand_without_a_map() -> None:
    # One token index, dK = 1, 2, 6 in three calls, dV = 0. Mean 3, squares about it 4 + 1 + 9 = 14 with two degrees of
    # freedom: variance 7, with or without the prior. Keys have square 4. A ridge beyond all bounds leaves no map.
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    deltas = [torch.tensor([[d, 0.0]], dtype=torch.float64) for d in (1.0, 2.0, 6.0)]
    errors = solve_errors(observed((PAIR, x, y) for y in deltas), ridge=1e30)
    assert errors is not None
    want = 7 * (1 + 1 / 3) / 4 / 2  # halved: the mean over keys and values
    assert errors.expect(PAIR, 1).tolist() == pytest.approx([want])
    assert errors.expect(None, 1).tolist() == pytest.approx([41 / 3 / 4 / 2])
    assert errors.expect(OTHER, 1).tolist() == pytest.approx([want])


def test_a_pair_never_seen_has_the_spread_between_pairs() -> None:
    x = torch.ones(1, 2, dtype=torch.float64)
    seen = [(PAIR, -10.0), (PAIR, -10.0), (OTHER, 10.0), (OTHER, 10.0)]
    errors = solve_errors(observed((p, x, torch.full((1, 2), d, dtype=torch.float64)) for p, d in seen), ridge=1e30)
    assert errors is not None
    assert errors.expect(PAIR, 1).tolist() == [0.0]
    # variance 400 / 3 about the common mean 0, of keys and of values of square 1, with 4 tokens seen
    assert errors.expect(Pair("isolated", "", "b/z"), 1).tolist() == pytest.approx([400 / 3 * 1.25])


def test_an_explained_offset_is_expected_to_be_right() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    xs = [torch.randn(1, 4, generator=generator, dtype=torch.float64) for _ in range(30)]
    exact = solve_errors(observed((PAIR, x, x @ a) for x in xs), ridge=1e-9)
    blurred = [x @ a + 3 * torch.randn(1, 4, generator=generator) for x in xs]
    noise = solve_errors(observed((PAIR, x, y) for x, y in zip(xs, blurred, strict=True)), ridge=1e-9)
    assert exact is not None and noise is not None
    assert float(exact.expect(PAIR, 1).max()) < 1e-6
    assert float(noise.expect(PAIR, 1).max()) > 0.1


def test_expected_errors_follow_the_true_ones_by_token_index() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 1.0 / torch.arange(1, 61, dtype=torch.float64)[:, None]

    def seen() -> Iterator[tuple[Pair, torch.Tensor, torch.Tensor]]:
        for _ in range(20):
            x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
            yield PAIR, x, size * torch.randn(60, 4, generator=generator, dtype=torch.float64)

    errors = solve_errors(observed(seen()), ridge=0.03)
    assert errors is not None
    expected = errors.expect(PAIR, 80)
    assert expected.shape == (80,)
    assert float(expected[0]) > 10 * float(expected[8])
    assert float(expected[4]) > 5 * float(expected[30])
    assert bool((expected[60:] < expected[8]).all())  # beyond what was seen: the last bucket's


def test_sums_of_two_processes_solve_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(PAIR if n % 2 else OTHER, *torch.randn(2, 20, 4, generator=generator).double()) for n in range(8)]
    whole, left, right = observed(iter(data)), observed(iter(data[:3])), observed(iter(data[3:]))
    left.merge(right)
    a, b = solve_errors(whole, 0.03), solve_errors(left, 0.03)
    assert a is not None and b is not None
    for pair in (PAIR, OTHER, None):
        torch.testing.assert_close(a.expect(pair, 20), b.expect(pair, 20))


def test_nothing_observed_expects_nothing() -> None:
    assert solve_errors(OffsetStatistics(2, 1, 2), 0.03) is None
