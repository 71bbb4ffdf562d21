"""The Triton kernels under Triton's interpreter, against the oracle: shapes, dtypes, layouts, offsets, int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcomm.rope import LayerRope, RopeSpec, ops
from tests.rope.oracle import TOLERANCES, error, make_spec, of_spec, oracle

pytest.importorskip("triton", reason="triton, the gpu extra, is not installed: kernels are not tested")
with pytest.MonkeyPatch.context() as patch:  # the variable is read when the kernels are defined
    patch.setenv("TRITON_INTERPRET", "1")
    import kvcomm.rope.triton_linear  # noqa: F401

from kvcomm.rope.move import cut, place, turn  # noqa: E402
from kvcomm.rope.view import AddedOffset, KVView, LinearMap, Scales  # noqa: E402

DTYPES = list(TOLERANCES)
BLOCK = 16  # tokens of a page
# Triton's interpreter cuts float32 to bfloat16 off instead of rounding it to nearest, as compiled code does: 2u, not u.
LIMITS = {dtype: (2 if dtype == torch.bfloat16 else 1) * tolerance.once for dtype, tolerance in TOLERANCES.items()}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mixed_spec(head_dim: int) -> RopeSpec:
    """Two layers alike, another theta, none, partial with the other pairing, and the first again: two groups."""
    first, other = make_spec(2, head_dim).layers, make_spec(1, head_dim, theta=1e6).layers
    partial = make_spec(1, head_dim, rotary_dim=head_dim // 4 * 2, interleaved=True).layers
    return RopeSpec((*first, *other, None, *partial, first[0]))


class Target:
    """A destination poisoned with NaN, contiguous or paged, and what was written to it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str, start: int = 5) -> None:
        layers, heads, tokens, dim = shape
        self.tokens, self.start, self.layout = tokens, start, layout
        if layout == "contiguous":
            self.memory = torch.full((2, layers, heads, start + tokens + 3, dim), torch.nan, dtype=dtype)
            part = self.memory[:, :, :, start : start + tokens]
            self.view = KVView.contiguous(part[0], part[1])
        elif layout == "list":  # a cache of one tensor [1, H, capacity, D] a layer
            self.memory = torch.full((layers, 2, heads, start + tokens + 3, dim), torch.nan, dtype=dtype)
            part = self.memory[:, :, :, start : start + tokens]
            order = [part[i] for i in range(layers)]
            self.view = KVView.contiguous([p[0] for p in order], [p[1] for p in order])
        else:
            blocks = -(-(start + tokens) // BLOCK)
            self.table = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(1))[:blocks]
            self.memory = torch.full((layers, 2, blocks + 3, BLOCK, heads, dim), torch.nan, dtype=dtype)
            keys, values = [m[0] for m in self.memory], [m[1] for m in self.memory]
            self.view = KVView.paged(keys, values, self.table, tokens, start)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [L, H, T, D], gathered by plain indexing; everything else must still be NaN."""
        if self.layout == "contiguous":
            keys, values = self.memory[:, :, :, self.start : self.start + self.tokens]
        elif self.layout == "list":
            keys, values = self.memory[:, :, :, self.start : self.start + self.tokens].unbind(1)
        else:
            at = torch.arange(self.start, self.start + self.tokens)
            rows = self.memory[:, :, self.table[at // BLOCK], at % BLOCK]  # [L, 2, T, H, D]
            keys, values = rows.transpose(2, 3).unbind(1)
        assert int(self.memory.isnan().sum()) == self.memory.numel() - 2 * keys.numel()
        return keys, values


def check(target: Target, keys: Tensor, values: Tensor, positions: Tensor, spec: RopeSpec, slack: float = 1) -> None:
    """Written: unrotated ``keys`` turned to ``positions``, and ``values``; both given in float64."""
    got_keys, got_values = target.read()
    limit = slack * LIMITS[got_keys.dtype]
    assert error(got_keys, oracle(keys, positions, of_spec(spec))) < limit
    assert error(got_values, values) < limit


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [60, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 63, 65])
def test_shapes(tokens: int, head_dim: int, heads: int) -> None:
    """Each shape with both pairings, and the two layouts in turn."""
    layers = 1 if heads == 8 else 2
    for number, interleaved in enumerate((False, True)):
        spec = make_spec(layers, head_dim, interleaved=interleaved)
        layout = ("contiguous", "paged")[(number + tokens // 63 + heads) % 2]
        keys, values = random(layers, heads, tokens, head_dim), random(layers, heads, tokens, head_dim, seed=1)
        positions = torch.arange(tokens) * 61 + 5
        target = Target(keys.shape, torch.float32, layout)
        place(KVView.contiguous(keys, values), target.view, positions, spec)
        check(target, keys.double(), values.double(), positions, spec)


@pytest.mark.parametrize("layout", ["contiguous", "list", "paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_in_layers_of_all_kinds(dtype: torch.dtype, layout: str) -> None:
    """Offsets of all dtypes, of all layers or of all but the first, with and without a factor."""
    spec, shape, positions = mixed_spec(32), (6, 3, 33, 32), torch.arange(33).flip(0) * 3
    keys, values = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    for skip, other, scaled in ((0, dtype, False), (1, torch.float32, True), (1, torch.bfloat16, False)):
        offset = random(2, 6 - skip, *shape[1:], dtype=other, seed=2)
        factor = torch.rand(6 - skip, 2) if scaled else None
        target = Target(shape, dtype, layout)
        added = AddedOffset(KVView.contiguous(offset[0], offset[1]), factor)
        place(KVView.contiguous(keys, values), target.view, positions, spec, offset=added)
        want = torch.stack([keys, values]).double()
        scale = torch.ones(6 - skip, 2) if factor is None else factor
        want[:, skip:] += scale.T.double()[:, :, None, None, None] * offset.double()
        check(target, want[0], want[1], positions, spec)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times the sine, which is then not used
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_without_rope_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    spec, positions = RopeSpec((None, *make_spec(1, 16).layers)), torch.arange(3) + 9
    keys = random(2, 1, 3, 16, dtype=dtype)
    keys[0, 0, 1, 2:10] = torch.inf
    target = Target(keys.shape, dtype, "contiguous")
    place(KVView.contiguous(keys, keys.clone()), target.view, positions, spec)
    got, values = target.read()
    assert torch.equal(got[0], keys[0]) and torch.equal(values, keys)
    alone = Target((1, 1, 3, 16), dtype, "paged")
    place(KVView.contiguous(keys[:1], keys[:1]), alone.view, positions, RopeSpec((None,)))
    assert torch.equal(alone.read()[0], keys[:1])


def linear_offset(keys: Tensor, values: Tensor, linear: LinearMap) -> Tensor:
    """The offset in float64, [2, layers, H, T, D]: written as a sum over single features."""
    x = torch.cat([keys, values], dim=-1).double()[-len(linear.weights) :]
    y = linear.intercept.double()[:, :, linear.buckets]
    for feature in range(x.shape[-1]):
        y += x[..., feature, None] * linear.weights.double()[:, :, None, feature]
    if linear.factor is not None:
        y *= linear.factor.double().repeat_interleave(keys.shape[-1], dim=1)[:, None, None]
    return torch.stack(y.chunk(2, dim=-1))


def make_linear(layers: int, heads: int, tokens: int, dim: int, *, by_columns: bool, factor: bool) -> LinearMap:
    weights = random(layers, heads, 2 * dim, 2 * dim, seed=3) * (0.3 / (2 * dim) ** 0.5)
    weights = weights.mT.contiguous().mT if by_columns else weights
    buckets = torch.arange(tokens).clamp_max(6)
    return LinearMap(
        weights, random(layers, heads, 7, 2 * dim, seed=4), buckets, torch.rand(layers, 2) if factor else None
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(1, 3, 64), (63, 1, 60), (65, 3, 80), (65, 1, 128), (65, 1, 256), (63, 2, 96), (33, 8, 16)],
)
def test_linear_offset(tokens: int, heads: int, head_dim: int, interleaved: bool) -> None:
    """Sums of 2 head_dim products in float32 allow an error a few times that of one rotation."""
    spec = make_spec(2, head_dim, interleaved=interleaved)
    keys, values = random(2, heads, tokens, head_dim), random(2, heads, tokens, head_dim, seed=1)
    positions = torch.arange(tokens) + 1000
    linear = make_linear(1, heads, tokens, head_dim, by_columns=interleaved, factor=tokens != 63)
    target = Target(keys.shape, torch.float32, "paged" if interleaved else "contiguous")
    place(KVView.contiguous(keys, values), target.view, positions, spec, offset=linear)
    want = torch.stack([keys, values]).double()
    want[:, 1:] += linear_offset(keys, values, linear)
    check(target, want[0], want[1], positions, spec, slack=3)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_offset_in_16_bits_and_layers_of_all_kinds(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    """With weights of 16 bits the oracle is given the same rounded weights and inputs. (The interpreter multiplies
    bfloat16 wrongly, as integers: weights in bfloat16 are compiled, but tested on a GPU only.)
    """
    spec, shape, positions = mixed_spec(32), (6, 2, 17, 32), torch.arange(17) * 5
    keys, values = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    linear = make_linear(5, 2, 17, 32, by_columns=True, factor=True)
    linear = LinearMap(linear.weights.to(weights_dtype), linear.intercept, linear.buckets, linear.factor)
    target = Target(shape, dtype, "paged")
    place(KVView.contiguous(keys, values), target.view, positions, spec, offset=linear)
    want = torch.stack([keys, values]).double()
    want[:, 1:] += linear_offset(keys.to(weights_dtype), values.to(weights_dtype), linear)
    check(target, want[0], want[1], positions, spec)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("scaled", ["by token", "by dimension"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_int8_bases(interleaved: bool, scaled: str, linear: bool) -> None:
    spec, shape, positions = make_spec(3, 40, rotary_dim=24, interleaved=interleaved), (3, 2, 37, 40), torch.arange(37)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (2, *shape), dtype=torch.int8, generator=generator)
    size = (3, 2, 37, 1) if scaled == "by token" else (3, 2, 1, 40)
    scales = Scales(*(torch.rand((2, *size), generator=generator) / 50))
    keys, values = codes[0].double() * scales.keys.double(), codes[1].double() * scales.values.double()
    offset = make_linear(2, 2, 37, 40, by_columns=True, factor=False) if linear else None
    for dtype in DTYPES:
        target = Target(shape, dtype, "paged")
        base = KVView.contiguous(codes[0], codes[1])
        place(base, target.view, positions, spec, offset=offset, scales=scales)
        want = torch.stack([keys, values])
        if offset is not None:
            want[:, 1:] += linear_offset(keys, values, offset)
        check(target, want[0], want[1], positions, spec, slack=3 if linear and dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "list", "paged"])
def test_cut_is_the_opposite_of_place(layout: str, dtype: torch.dtype) -> None:
    spec, shape, positions = mixed_spec(48), (6, 3, 65, 48), torch.arange(65) + 900
    keys, values = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    cache = Target(shape, dtype, layout)
    place(KVView.contiguous(keys, values), cache.view, positions, spec)
    rotated, _ = cache.read()
    out = torch.full((2, *shape), torch.nan, dtype=dtype)
    cut(cache.view, KVView.contiguous(out[0], out[1]), positions, spec)
    assert error(out[0], oracle(rotated, positions, of_spec(spec), sign=-1)) < LIMITS[dtype]
    assert torch.equal(out[1], values)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turn_takes_any_strides(interleaved: bool, inverse: bool) -> None:
    """The implementation behind ``rotate``, ``unrotate`` and ``rotate_add`` on a GPU."""
    spec, positions = make_spec(3, 16, rotary_dim=12, interleaved=interleaved), torch.arange(21) + 100
    keys, offset = random(3, 2, 21, 16), random(3, 2, 21, 16, seed=1)
    for form in (keys, keys.transpose(1, 2).contiguous().transpose(1, 2), keys.mT.contiguous().mT):
        buffer = torch.full((3, 2, 21, 35), torch.nan)
        view = buffer[..., 1:33:2]
        assert turn(form, positions, spec, out=view, offset=offset, inverse=inverse) is view
        want = oracle(keys.double() + offset.double(), positions, of_spec(spec), sign=-1 if inverse else 1)
        assert error(view, want) < TOLERANCES[torch.float32].once
        assert int(buffer.isnan().sum()) == buffer.numel() - view.numel()
    assert turn(keys[:, :, :0], positions[:0], spec).shape == (3, 2, 0, 16)
    assert torch.equal(ops.IMPLEMENTATIONS["cuda"](keys, positions, spec), turn(keys, positions, spec))


def test_heads_are_shared_out_where_there_are_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcomm.rope import launch

    spec, keys, positions = make_spec(2, 64), random(2, 5, 40, 64), torch.arange(40)
    results: list[Any] = []
    for programs in (1, 4, 1000):
        monkeypatch.setattr(launch, "_PROGRAMS", programs)
        results.append(turn(keys, positions, spec))
    assert all(torch.equal(results[0], result) for result in results)
    assert error(results[0], oracle(keys, positions, of_spec(spec))) < TOLERANCES[torch.float32].once


def test_per_layer_theta_has_a_table_each() -> None:
    layers = [LayerRope("default", (1.0, 1.0 / (10 + n)), 1.0, 4) for n in range(5)]
    spec, keys, positions = RopeSpec(tuple(layers)), random(5, 1, 9, 4), torch.arange(9) * 7
    assert error(turn(keys, positions, spec), oracle(keys, positions, of_spec(spec))) < TOLERANCES[torch.float32].once
