"""Ways to estimate offsets, on made-up tokens with a known law."""

from __future__ import annotations

import pytest
import torch

from eval.studies.offset_study import SHORT, VARIANTS, Tokens, _add, _shares, predict

HEADS, WIDTH, CALLS, LENGTH = 2, 6, 40, 100


def made(seed: int, weights: torch.Tensor) -> Tokens:
    """Calls of two pairs: a mean by pair, a linear law within a head, no noise."""
    draw = torch.Generator().manual_seed(seed)
    n = CALLS * LENGTH
    x = torch.randn(n, HEADS, WIDTH, generator=draw)
    place = torch.arange(n) // LENGTH % 2
    means = torch.tensor([-3.0, 5.0])[place][:, None, None]
    y = torch.einsum("nhi,hij->nhj", x, weights) + means
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return Tokens(x, y, before, x.flatten(1), place, torch.arange(n) % LENGTH)


@pytest.fixture(scope="module")
def shares() -> dict[str, dict[str, float]]:
    weights = torch.randn(HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    seen, asked = made(2, weights), made(3, weights)
    found: dict[str, dict[str, float]] = {}
    for name, variant in VARIANTS.items():
        sums: dict[str, list[torch.Tensor]] = {}
        _add(sums, predict(variant, seen, asked), asked)
        found[name] = _shares(sums)
    return found


def test_a_law_within_the_head_is_found(shares: dict[str, dict[str, float]]) -> None:
    for name in ("linear", "ridge ÷ 10", "all heads", "token", "token before", "short only", "8 bits", "rank 16"):
        assert min(shares[name].values()) > 0.98, name


def test_variants_that_leave_something_out_explain_less(shares: dict[str, dict[str, float]]) -> None:
    assert shares["mean"]["keys"] < shares["linear"]["keys"] - 0.05
    assert shares["one mean"]["keys"] < 0.5  # the two pairs' means are far apart
    assert shares["ridge × 10"]["keys"] < shares["linear"]["keys"] < shares["ridge ÷ 10"]["keys"]


def test_a_place_never_seen_takes_the_mean_of_all() -> None:
    tokens = made(2, torch.zeros(HEADS, WIDTH, WIDTH))
    elsewhere = Tokens(tokens.x, tokens.y, tokens.before, tokens.word, tokens.place + 7, tokens.index)
    predicted = predict(VARIANTS["mean"], tokens, elsewhere)
    torch.testing.assert_close(predicted, torch.full_like(predicted, 1.0))
    assert int(tokens.where(tokens.index <= SHORT).index.max()) == SHORT
