"""Wrong input to place and cut is refused before anything is launched; triton is loaded late, or not at all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm.errors import InvalidInput
from kvcomm.rope import move, ops, reference
from kvcomm.rope.view import AddedOffset, KVView, LinearMap, Scales
from tests.rope.oracle import make_spec

ROOT = Path(__file__).resolve().parents[2]
SPEC, POSITIONS = make_spec(2, 16), torch.arange(5)
SHAPE = (2, 3, 5, 16)


def view(*shape: int, dtype: torch.dtype = torch.float32) -> KVView:
    return KVView.contiguous(torch.zeros(shape or SHAPE, dtype=dtype), torch.zeros(shape or SHAPE, dtype=dtype))


def paged(table: list[int], tokens: int = 5, start: int = 0, dtype: torch.dtype = torch.int64) -> KVView:
    pages = torch.zeros(2, 4, 8, 3, 16)
    return KVView.paged(pages, pages.clone(), torch.tensor(table, dtype=dtype), tokens, start)


def linear(**changes: Any) -> LinearMap:
    parts = {
        "weights": torch.zeros(1, 3, 32, 32),
        "intercept": torch.zeros(1, 3, 4, 32),
        "buckets": torch.zeros(5, dtype=torch.int64),
    }
    return LinearMap(**{**parts, **changes})


def codes() -> dict[str, Any]:
    return {"base": view(dtype=torch.int8)}


SHARED = torch.zeros(2, 2, 3, 9, 16)
WRONG: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"base": view(2, 3, 4, 16)}, r"\[2, 3, 4, 16\] to \[2, 3, 5, 16\]"),
    (lambda: {"base": KVView.contiguous(torch.zeros(SHAPE))}, "values on both sides or on neither"),
    (
        lambda: {"target": KVView.contiguous(torch.zeros(SHAPE, device="meta"), torch.zeros(SHAPE, device="meta"))},
        "meta",
    ),
    (lambda: {"target": view(dtype=torch.int8)}, "target is torch.int8"),
    (lambda: {"base": view(3, 3, 5, 16), "target": view(3, 3, 5, 16)}, "3 layers of head_dim 16, the spec 2"),
    (lambda: {"base": view(2, 3, 5, 8), "target": view(2, 3, 5, 8)}, "head_dim 8"),
    (lambda: {"positions": POSITIONS - 1}, "position -1 is below 0"),
    (lambda: {"positions": POSITIONS[:4]}, r"pass \[5\] torch.int64"),
    (lambda: {"target": KVView.contiguous(*torch.zeros(2, 2, 1, 5, 16).expand(2, 2, 3, 5, 16))}, "not expanded"),
    (
        lambda: {"base": KVView.contiguous(*SHARED[:, :, :, :5]), "target": KVView.contiguous(*SHARED[:, :, :, 2:7])},
        "shares",
    ),
    (codes, "scales are absent"),
    (lambda: {"scales": Scales(torch.ones(2, 3, 5, 1), torch.ones(2, 3, 5, 1))}, "scales are given"),
    (lambda: codes() | {"scales": Scales(torch.ones(2, 3, 5, 1), torch.ones(2, 3, 5))}, r"values are \[2, 3, 5\]"),
    (
        lambda: codes() | {"scales": Scales(torch.ones(2, 3, 1, 16).double(), torch.ones(2, 3, 5, 1))},
        "keys are.*float64",
    ),
    (lambda: {"offset": AddedOffset(view(3, 3, 5, 16))}, "does not go with base"),
    (lambda: {"offset": AddedOffset(view(1, 3, 4, 16))}, "does not go with base"),
    (lambda: {"offset": AddedOffset(KVView.contiguous(torch.zeros(SHAPE)))}, "both have values, or neither"),
    (lambda: {"offset": AddedOffset(view(1, 3, 5, 16), torch.ones(2, 2))}, r"factor is \[2, 2\]"),
    (lambda: {"offset": linear(weights=torch.zeros(1, 3, 16, 16))}, r"weights are \[1, 3, 16, 16\]"),
    (lambda: {"offset": linear(weights=torch.zeros(3, 3, 32, 32))}, r"up to 2"),
    (lambda: {"offset": linear(intercept=torch.zeros(1, 3, 4, 16))}, "intercept is"),
    (lambda: {"offset": linear(intercept=torch.zeros(1, 3, 4, 32).double())}, "intercept is.*float64"),
    (lambda: {"offset": linear(buckets=torch.zeros(4, dtype=torch.int64))}, r"buckets are \[4\]"),
    (lambda: {"offset": linear(buckets=torch.full((5,), 4))}, "buckets are 4 to 4, the intercept has 4"),
    (lambda: {"offset": linear(factor=torch.ones(1, 2).double())}, "factor is"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[says for _, says in WRONG])
def test_place_refuses(changes: Callable[[], dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise RuntimeError("launched")

    monkeypatch.setattr(move, "launches", launched)
    right = {"base": view(), "target": view(), "positions": POSITIONS, "spec": SPEC}
    with pytest.raises(RuntimeError, match="launched"):
        move.place(**right)
    with pytest.raises(InvalidInput, match=says):
        move.place(**{**right, **changes()})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: paged([0, 4]), "blocks 0 to 4 of a cache that has 4"),
        (lambda: paged([-1, 2]), "blocks -1 to 2"),
        (lambda: paged([0, 1], tokens=14, start=3), "14 tokens from 3 do not fit 2 blocks of 8"),
        (lambda: paged([0], tokens=-1), "-1 tokens"),
        (lambda: paged([0], dtype=torch.int16), "int16"),
        (lambda: KVView.contiguous(torch.zeros(3, 5, 16)), "keys are not"),
        (lambda: KVView.contiguous([]), "keys are not"),
        (lambda: KVView.contiguous(torch.zeros(SHAPE), torch.zeros(2, 3, 4, 16)), "laid out alike"),
        (lambda: KVView.contiguous([torch.zeros(3, 5, 16), torch.zeros(3, 16, 5).mT]), "laid out alike"),
        (lambda: KVView.contiguous(torch.zeros(SHAPE), torch.zeros(3, 3, 5, 16)), "2 layers and values 3"),
        (lambda: view(dtype=torch.float64), "float64"),
    ],
)
def test_views_refuse(make: Callable[[], KVView], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        make()


def test_cut_refuses_codes() -> None:
    with pytest.raises(InvalidInput, match="cannot be cut"):
        move.cut(view(dtype=torch.int8), view(), POSITIONS, SPEC)


def test_importing_does_not_load_triton() -> None:
    code = "import sys, kvcomm, kvcomm.rope, kvcomm.rope.move; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_plain_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ops._kernel.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    keys = torch.randn(SHAPE)
    with pytest.warns(UserWarning, match="triton is not installed.*install kvcomm"):
        got = ops.IMPLEMENTATIONS["cuda"](keys, POSITIONS, SPEC)
    ops._kernel.cache_clear()
    assert torch.equal(got, reference.turn(keys, POSITIONS, SPEC))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile_ahead_of_time(target: str) -> None:
    """One small kernel a backend; ``make kernels`` compiles all of them."""
    pytest.importorskip("triton", reason="triton, the gpu extra, is not installed: kernels are not compiled")
    arguments = ["--only", "place, D 128 bf16", "--check", "--jobs", "1", "--target", target]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert "| place, D 128 | bf16 | 4.01 |" in done.stdout


def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run python -m benchmarks.gpu")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no CUDA device" in done.stdout
