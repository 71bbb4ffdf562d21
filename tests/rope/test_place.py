"""A base with a linear offset, put in place block by block, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcomm.rope import RopeSpec, place
from kvcomm.rope.view import LinearMap
from tests.rope.oracle import TOLERANCES, error, make_spec, of_spec, oracle

DTYPES = list(TOLERANCES)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def map_of(layers: int, heads: int, dim: int, tokens: int, factor: bool) -> LinearMap:
    weights = random(layers, heads, 2 * dim, 2 * dim, seed=3) * 0.3 / (2 * dim) ** 0.5
    intercept, shrink = random(layers, heads, 5, 2 * dim, seed=4), torch.rand(layers, 2)
    return LinearMap(weights, intercept, torch.arange(tokens).clamp_max(4), shrink if factor else None)


def expected(keys: Tensor, values: Tensor, positions: Tensor, spec: RopeSpec, offset: LinearMap) -> list[Tensor]:
    x = torch.cat([keys, values], -1).double()[-len(offset.weights) :]
    y = x @ offset.weights.double() + offset.intercept[:, :, offset.buckets].double()
    if offset.factor is not None:
        y = y * offset.factor.double()[:, None, None].repeat_interleave(keys.shape[-1], -1)
    sums = [part.double() for part in (keys, values)]
    for total, more in zip(sums, y.chunk(2, -1), strict=True):
        total[-len(y) :] += more
    return [oracle(sums[0], positions, of_spec(spec)), sums[1]]


def run(keys: Tensor, values: Tensor, positions: Tensor, spec: RopeSpec, offset: LinearMap) -> list[Tensor]:
    """Into a slice of a larger buffer full of NaN, of which nothing else may be written."""
    layers, heads, tokens, dim = keys.shape
    whole = torch.full((2, layers, heads, tokens + 5, dim), torch.nan, dtype=keys.dtype)
    inside = whole[:, :, :, 2 : 2 + tokens]
    place.place_linear(keys, values, inside[0], inside[1], positions, spec, offset)
    assert bool(whole[:, :, :, :2].isnan().all()) and bool(whole[:, :, :, 2 + tokens :].isnan().all())
    return [inside[0], inside[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 60), (3, 63, 64), (8, 65, 80), (2, 33, 256)])
def test_shapes(heads: int, tokens: int, dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    spec = make_spec(3, dim, rotary_dim=dim // 4 * 2, interleaved=interleaved)
    keys, values = random(3, heads, tokens, dim, seed=1).to(dtype), random(3, heads, tokens, dim, seed=2).to(dtype)
    positions, offset = torch.arange(tokens) * 7 + 3, map_of(2, heads, dim, tokens, factor=True)
    found = run(keys, values, positions, spec, offset)
    for got, want in zip(found, expected(keys, values, positions, spec, offset), strict=True):
        assert error(got, want) < 2 * TOLERANCES[dtype].once


@pytest.mark.parametrize("budget", [1 << 10, 1 << 14, 1 << 30])
@pytest.mark.parametrize("corrected", [1, 4, 5])
def test_any_cut_into_blocks_is_the_same(corrected: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two rotations and one of none; an offset on the last, on all but the first, on all."""
    spec = RopeSpec((*make_spec(2, 16).layers, None, *make_spec(2, 16, theta=1e6).layers))
    keys, values = random(5, 2, 70, 16, seed=1), random(5, 2, 70, 16, seed=2)
    positions, offset = torch.arange(70).flip(0), map_of(corrected, 2, 16, 70, factor=False)
    monkeypatch.setattr(place, "_BLOCK_BYTES", budget)
    found = run(keys, values, positions, spec, offset)
    for got, want in zip(found, expected(keys, values, positions, spec, offset), strict=True):
        assert error(got, want) < 2 * TOLERANCES[torch.float32].once


def test_weights_of_16_bits_round_the_offset_alone() -> None:
    spec, positions = make_spec(2, 64), torch.arange(100)
    keys, values = random(2, 3, 100, 64, seed=1), random(2, 3, 100, 64, seed=2)
    offset = map_of(1, 3, 64, 100, factor=True)
    rounded = LinearMap(offset.weights.bfloat16(), offset.intercept, offset.buckets, offset.factor)
    found = run(keys, values, positions, spec, rounded)
    for got, want in zip(found, expected(keys, values, positions, spec, offset), strict=True):
        assert error(got[0], want[0]) < TOLERANCES[torch.float32].once
        assert error(got[1], want[1]) < 0.3 * 2**-6  # offsets are 0.3 of the base here; u = 2**-9, a few roundings
