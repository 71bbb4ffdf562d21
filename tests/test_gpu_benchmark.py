"""What benchmarks.gpu would run on a GPU, small and on the CPU, so that the one call there is not its first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks import flex, gpu, gpu_attention
from kvcomm.hf.attend import Shape
from kvcomm.hf.grouped import Grouped

CPU = torch.device("cpu")


def once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    traced = torch.compile(flex_attention, dynamic=True, backend="eager")
    monkeypatch.setattr(flex, "compiled", lambda: traced)
    shape = Shape(4, 2, 16, torch.float32, CPU, (None, 40))
    with torch.inference_mode():
        rows = gpu_attention.attention(once, shape, 512)
    assert len(rows) == 4 * 2 * len(gpu_attention.implementations())
    assert all(row["ok"] and row["s"] > 0 and row["over_dense_per_token"] > 0 for row in rows), rows
    assert {row["tokens"] for row in rows} == {512, 256, 51, 64}


def test_attention_that_is_wrong_or_fails_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unscaled(Grouped):
        def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
            return super().__call__(query, key, value, 1.0)

    class Failing(Grouped):
        def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
            raise RuntimeError("no kernel image")

    found = {"sdpa": Grouped, "unscaled": Unscaled, "failing": Failing}
    monkeypatch.setattr(gpu_attention, "implementations", lambda: found)
    with torch.inference_mode():
        rows = gpu_attention.attention(once, Shape(2, 1, 8, torch.float32, CPU, (None,)), 64)
    assert {row["attention"]: row["ok"] for row in rows} == {"sdpa": True, "unscaled": False, "failing": False}
    assert all("no kernel image" in row["failed"] for row in rows if row["attention"] == "failing")


@pytest.mark.slow
def test_correctness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, which cuts bfloat16 off and so is not held to the limit of compiled code there."""
    pytest.importorskip("triton", reason="triton, the gpu extra, is not installed: kernels are not tested")
    with pytest.MonkeyPatch.context() as patch:  # the variable is read when the kernels are defined
        patch.setenv("TRITON_INTERPRET", "1")
        import kvcomm.rope.triton_linear  # noqa: F401
    monkeypatch.setattr(gpu, "DTYPES", {"fp32": torch.float32})
    rows = gpu.correctness("cpu")
    assert len(rows) == 10 and all(row["ok"] for row in rows), rows
    monkeypatch.setattr(gpu, "DTYPES", {"fp16": torch.float16})
    monkeypatch.setattr(gpu, "oracle", lambda keys, *_, **__: keys.double())
    assert not any(row["ok"] for row in gpu.correctness("cpu"))


def test_first_token() -> None:
    model, tokenizer = gpu.random_model("cpu", layers=2, hidden=512)
    chosen, *rows = gpu.first_token(model, tokenizer, segment_tokens=24, repeats=1)
    assert chosen["attention"] == "Grouped" and chosen["kernels"] is False and chosen["engine_s"] > 0
    assert chosen["linear_maps"] == chosen["parts"] == 4
    assert [row["policy"] for row in rows] == ["dense", "balanced", "fast"]
    assert all(row["prompt_tokens"] == 160 and math.isfinite(row["dense_over_it"]) for row in rows)
