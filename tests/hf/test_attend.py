"""Implementations of attention over chosen positions against softmax in float64, and which of them is chosen."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import flex
from kvcomm.hf import attend, flash
from kvcomm.hf.attend import Implementation, Shape, choose, difference, flash_or_grouped
from kvcomm.hf.flash import Flash, pieces_of
from kvcomm.hf.grouped import Grouped
from tests.tiny_backend import backend_of
from tests.tiny_models import FAMILIES

LENGTH, SPARE = 330, 7  # keys in sight, and poisoned ones behind them
SPREADS = {
    "scattered": list(range(1, LENGTH, 3)),
    "runs": [*range(4, 12), *range(50, 195), *range(300, 316)],
    "tail": list(range(200, LENGTH)),
    "from the start": [*range(0, 5), *range(20, 90)],
    "one": [LENGTH - 1],
}
HEADS = [(4, 4), (6, 2), (3, 1)]
WINDOWS = [None, 1, 9, 1000]


def fake_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """flash_attn_with_kvcache as its documentation says, in loops: row r of R over S keys stands at key S - R + r, sees
    keys from ``window_size[0]`` before it (-1: all) to itself, and gives 0 where it sees none.
    """
    assert causal and q.shape[2] % k_cache.shape[2] == 0 and q.stride(-1) == k_cache.stride(-1) == 1
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    out = torch.zeros(q.shape, dtype=q.dtype)
    rows, heads, group = q.shape[1], q.shape[2], q.shape[2] // k_cache.shape[2]
    for n, size in enumerate(cache_seqlens.tolist()):
        keys, values = k_cache[int(cache_batch_idx[n])], v_cache[int(cache_batch_idx[n])]
        for row in range(rows):
            stop = size - rows + row + 1
            start = 0 if window_size[0] < 0 else max(0, stop - 1 - window_size[0])
            for head in range(heads) if stop > start else ():
                scores = keys[start:stop, head // group].double() @ q[n, row, head].double() * softmax_scale
                out[n, row, head] = (scores.softmax(0) @ values[start:stop, head // group].double()).to(q.dtype)
    return out


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = fake_flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    traced = torch.compile(flex_attention, dynamic=True, backend="eager")
    monkeypatch.setattr(flex, "compiled", lambda: traced)


def check(
    implementation: Implementation,
    positions: list[int],
    heads: tuple[int, int] = (6, 2),
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Against softmax in float64 over the same rounded inputs; keys behind the last position are NaN."""
    generator, length, width = torch.Generator().manual_seed(0), positions[-1] + 1, 24
    query = torch.randn(1, heads[0], len(positions), width, generator=generator).to(dtype)
    whole = torch.randn(2, 1, heads[1], length + SPARE, width, generator=generator).to(dtype)
    whole[:, :, :, length:] = torch.nan
    key, value = whole.to(device)[:, :, :, :length]
    where = torch.tensor(positions)
    with torch.inference_mode():
        attention = implementation(where.to(device), window, dtype)
        got = attention(query.to(device), key, value, 0.3).cpu()
        again = attention(query.to(device), key, value, 0.3).cpu()
    assert torch.equal(got, again) or device != "cpu"
    keys = torch.arange(length)
    hidden = keys[None] > where[:, None]
    if window is not None:
        hidden |= keys[None] <= where[:, None] - window
    k, v = (part[0].double().cpu().repeat_interleave(heads[0] // heads[1], 0) for part in (key, value))
    want = (query[0].double() @ k.mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    assert got.shape == (1, len(positions), heads[0], width) and got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got[0].transpose(0, 1).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("spread", SPREADS)
def test_grouped(spread: str, heads: tuple[int, int], window: int | None) -> None:
    check(Grouped, SPREADS[spread], heads, window)


def test_masks_of_a_device_are_blocks_with_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of blocks that a GPU gets, on tensors of a device without data."""
    on_device = torch.empty(200, dtype=torch.int64, device="meta")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: list(range(100, 300)))
    blocks = Grouped(on_device, 30, torch.bfloat16).blocks
    assert [(b.first, b.stop, b.low, b.high) for b in blocks] == [(0, 128, 71, 228), (128, 200, 199, 300)]
    assert [tuple(b.bias.shape) for b in blocks] == [(1, 1, 128, 157), (1, 1, 72, 101)]
    assert all(b.bias.stride(2) % 16 == 0 and b.bias.stride(3) == 1 for b in blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("spread", SPREADS)
def test_flex_attention(spread: str, window: int | None, uncompiled: None) -> None:
    """Traced, not compiled; which is how the mask, the padding and the grouping are the same without a compiler."""
    check(flex.Flex, SPREADS[spread], window=window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("spread", SPREADS)
def test_flash_as_documented(spread: str, window: int | None, flash_attn: None) -> None:
    """Pieces, padding and lengths, with a stand-in that does what flash-attn's documentation says."""
    check(Flash, SPREADS[spread], window=window)


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flash_attn") is None,
    reason="flash-attn runs on a CUDA device only, and one of the two is missing: its call is not tested",
)
@pytest.mark.parametrize("dtype", flash.DTYPES, ids=str)
def test_flash_on_a_gpu(dtype: torch.dtype) -> None:
    for positions, heads, window in itertools.product(SPREADS.values(), HEADS, WINDOWS):
        check(Flash, positions, heads, window, dtype, "cuda")


def test_pieces() -> None:
    assert pieces_of([3]) == [(0, 1)]
    assert pieces_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (3, 4), (4, 6)]
    assert pieces_of(list(range(10, 140))) == [(0, 64), (64, 128), (128, 130)]


def test_flash_is_for_runs(flash_attn: None) -> None:
    def kind(positions: list[int]) -> type:
        return type(flash_or_grouped(torch.tensor(positions), None, torch.float32))

    assert kind(SPREADS["tail"]) is kind(SPREADS["runs"]) is kind([p for p in range(200) if p % 20 < 16]) is Flash
    assert kind(SPREADS["scattered"]) is kind([3]) is kind([p for p in range(200) if p % 20 < 15]) is Grouped
    check(flash_or_grouped, SPREADS["runs"])
    check(flash_or_grouped, SPREADS["scattered"])


def shape(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> Shape:
    return Shape(6, 2, head_dim, dtype, torch.device(device), (None, 9))


def test_chosen_by_device_dtype_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def right(name: str, implementation: Implementation, of: Shape) -> bool:
        asked.append(name)
        return True

    monkeypatch.setattr(attend, "_is_right", right)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose(shape("cpu")) is choose(shape(dtype=torch.float32)) is Grouped
    assert choose(shape(head_dim=320)) is choose(shape(head_dim=60)) is Grouped
    assert asked == []
    assert choose(shape()) is choose(shape(dtype=torch.float16, head_dim=256)) is flash_or_grouped
    assert asked == ["flash-attn"] * 2
    monkeypatch.setattr(attend, "_is_right", lambda *_: False)
    assert choose(shape()) is Grouped
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose(shape()) is Grouped


def test_an_implementation_is_proven(
    monkeypatch: pytest.MonkeyPatch, flash_attn: None, caplog: pytest.LogCaptureFixture
) -> None:
    here = shape("cpu", torch.float32, 8)
    monkeypatch.setattr(attend, "_spreads", lambda: [[0], [*range(3, 30), 40]])
    assert attend._is_right("flash-attn", Flash, here) and caplog.records == []

    def narrow(positions: Tensor, window: int | None, dtype: torch.dtype) -> Any:
        return Flash(positions, None if window is None else window - 1, dtype)

    assert difference(narrow, here, [*range(3, 30)]) > 0.01
    assert not attend._is_right("flash-attn", narrow, here)
    assert "is off by" in caplog.text
    monkeypatch.setattr(Flash, "__call__", lambda *_: torch.full((1, 1, 6, 8), torch.nan))
    assert not attend._is_right("flash-attn", Flash, here)
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert not attend._is_right("flash-attn", Flash, here)
    assert "fails on cpu" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_backend_runs_what_was_chosen(family: str, flash_attn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model with flash's pieces gives what it gives with torch's kernel, windows included."""
    from kvcomm.reuse.backend import KVBuffer

    backend = backend_of(FAMILIES[family]())
    assert backend.attend is Grouped and backend.grouped
    ids, positions = [(11 * n + 5) % 128 for n in range(70)], [*range(4, 12), *range(40, 60)]
    found = []
    for implementation in (Grouped, Flash):
        backend.attend = implementation
        buffer = KVBuffer(backend.spec, 70)
        backend.grouped = False
        backend.forward(buffer, ids, range(70), 0)
        backend.grouped = True
        logits = backend.forward(buffer, [(ids[p] + 1) % 128 for p in positions], positions, 3)
        watched = backend.attended(buffer, [ids[p] for p in positions], positions, [59])
        found.append((buffer.keys, buffer.values, logits, watched))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
