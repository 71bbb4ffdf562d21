"""The rotation itself: against the oracle over shapes, pairings and layouts, and its algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcomm.rope import RopeSpec, rotate, rotate_add, unrotate
from tests.rope.oracle import TOLERANCES, error, make_spec, of_spec, oracle

DTYPES = list(TOLERANCES)
FLOAT = TOLERANCES[torch.float32]


def random_keys(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mixed_spec(head_dim: int) -> RopeSpec:
    """Adjacent layers alike, then another theta, none, partial, and the first again."""
    first, other = make_spec(2, head_dim).layers, make_spec(1, head_dim, theta=1e6).layers
    partial = make_spec(1, head_dim, rotary_dim=head_dim // 4 * 2, interleaved=True).layers
    return RopeSpec((*first, *other, None, *partial, first[0]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 63, 65])
def test_shapes(count: int, heads: int, head_dim: int, interleaved: bool) -> None:
    spec = make_spec(2, head_dim, interleaved=interleaved)
    keys, positions = random_keys(2, heads, count, head_dim), torch.arange(count) * 61 + 5
    assert error(rotate(keys, positions, spec), oracle(keys, positions, of_spec(spec))) < FLOAT.once
    assert error(unrotate(keys, positions, spec), oracle(keys, positions, of_spec(spec), sign=-1)) < FLOAT.once


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 700, 1500])  # below, across and well past a block
def test_layers_of_all_kinds(count: int, dtype: torch.dtype) -> None:
    spec = mixed_spec(64)
    keys, positions = random_keys(6, 3, count, 64, dtype=dtype), torch.arange(count).flip(0) * 3
    got, want = rotate(keys, positions, spec), oracle(keys, positions, of_spec(spec))
    assert got.dtype == dtype
    assert error(got, want) < TOLERANCES[dtype].once
    assert torch.equal(got[3], keys[3])
    assert torch.equal(got[4, ..., 32:], keys[4, ..., 32:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["slice", "odd stride", "transposed"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_writes_the_whole_of_out_and_nothing_else(interleaved: bool, layout: str, dtype: torch.dtype) -> None:
    spec = make_spec(3, 16, rotary_dim=12, interleaved=interleaved)
    if layout == "slice":
        buffer = torch.full((3, 2, 40, 16), torch.nan, dtype=dtype)
        view = buffer[:, :, 7:28]
    elif layout == "odd stride":
        buffer = torch.full((3, 2, 21, 35), torch.nan, dtype=dtype)
        view = buffer[..., 1:33:2]
    else:
        buffer = torch.full((16, 21, 2, 3), torch.nan, dtype=dtype)
        view = buffer.permute(3, 2, 1, 0)
    keys, positions = random_keys(3, 2, 21, 16, dtype=dtype), torch.arange(21) + 100
    for form in (keys, keys.transpose(1, 2).contiguous().transpose(1, 2), keys.mT.contiguous().mT):
        view.fill_(torch.nan)
        before = form.clone()
        assert rotate(form, positions, spec, out=view) is view
        assert error(view, oracle(keys, positions, of_spec(spec))) < TOLERANCES[dtype].once
        plain = rotate(keys, positions, spec)  # torch's complex product may differ in the last bit with the layout
        assert error(view, plain) < TOLERANCES[dtype].once if interleaved else torch.equal(view, plain)
        assert torch.equal(form, before)
        assert int(buffer.isnan().sum()) == buffer.numel() - view.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset_dtype", DTYPES, ids=str)
def test_offset_is_added_before_the_rotation(dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    spec, positions = mixed_spec(32), torch.arange(65) + 900
    base, offset = random_keys(6, 2, 65, 32, dtype=dtype), random_keys(6, 2, 65, 32, dtype=offset_dtype, seed=1)
    out = torch.full((6, 2, 100, 32), torch.nan, dtype=dtype)[:, :, 3:68]
    got = rotate_add(base, offset, positions, spec, out=out)
    want = oracle(base.double() + offset.double(), positions, of_spec(spec))
    assert got is out
    assert error(got, want) < TOLERANCES[dtype].once


def test_no_tokens() -> None:
    keys = torch.empty(2, 3, 0, 64)
    assert rotate(keys, torch.empty(0, dtype=torch.int64), make_spec(2, 64)).shape == keys.shape


def test_keys_that_want_gradients_and_inference_mode() -> None:
    spec, positions = make_spec(1, 16), torch.arange(5)
    keys = random_keys(1, 1, 5, 16)
    got = rotate(keys.clone().requires_grad_(), positions, spec)
    assert not got.requires_grad
    with torch.inference_mode():
        assert torch.equal(rotate(keys, positions, spec), got)


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "pairs": st.integers(1, 24),
        "extra": st.integers(0, 9),
        "interleaved": st.booleans(),
        "p": st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
        "q": st.integers(0, 2**20),
    }
)


def _case(case: dict[str, int | bool | list[int]]) -> tuple[RopeSpec, Tensor, Tensor, Tensor]:
    width = 2 * int(case["pairs"])  # type: ignore[arg-type]
    dim = width + int(case["extra"])  # type: ignore[arg-type]
    spec = make_spec(2, dim, rotary_dim=width, interleaved=bool(case["interleaved"]))
    p = torch.tensor(case["p"])
    keys = random_keys(2, 2, len(p), dim, seed=int(case["seed"]))  # type: ignore[arg-type]
    return spec, keys, p, p.flip(0) + int(case["q"])  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(cases)
def test_norm_is_kept(case: dict[str, int | bool | list[int]]) -> None:
    spec, keys, p, _ = _case(case)
    assert error(rotate(keys, p, spec).double().norm(dim=-1), keys.double().norm(dim=-1)) < FLOAT.once


@settings(max_examples=60, deadline=None)
@given(cases)
def test_rotation_and_its_opposite_undo_each_other(case: dict[str, int | bool | list[int]]) -> None:
    spec, keys, p, q = _case(case)
    assert error(rotate(unrotate(keys, p, spec), p, spec), keys) < 2 * FLOAT.once
    assert error(unrotate(rotate(keys, q, spec), q, spec), keys) < 2 * FLOAT.once


@settings(max_examples=60, deadline=None)
@given(cases)
def test_moving_twice_is_moving_once(case: dict[str, int | bool | list[int]]) -> None:
    """From p to q and from q to 3 is the same as from p to 3, whatever the path."""
    spec, keys, p, q = _case(case)
    end = torch.full_like(p, 3)
    direct = rotate(unrotate(keys, p, spec), end, spec)
    by_q = rotate(unrotate(rotate(unrotate(keys, p, spec), q, spec), q, spec), end, spec)
    assert error(by_q, direct) < FLOAT.model


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_angles_add(first: int, second: int, interleaved: bool) -> None:
    """R(p) R(q) = R(p + q), within the rounding of the float32 angles (at most 1000 radians here)."""
    spec, keys = make_spec(1, 32, interleaved=interleaved), random_keys(1, 2, 1, 32)
    p, q = torch.tensor([first]), torch.tensor([second])
    assert error(rotate(rotate(keys, p, spec), q, spec), rotate(keys, p + q, spec)) < 2e-4
