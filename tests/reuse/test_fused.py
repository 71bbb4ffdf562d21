"""Splice and cut by kernel, under Triton's interpreter, equal plain torch's; and what happens without kernels."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcomm.anchors import offset as offsets
from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.statistics import Pair
from kvcomm.reuse import fused
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.splice import cut, splice
from kvcomm.rope import RopeSpec
from kvcomm.types import ModelFingerprint, SegmentKV
from tests.reuse.scene import make_case, state_error, state_of
from tests.reuse.test_splice import LENGTHS
from tests.rope.oracle import TOLERANCES, make_spec
from tests.tiny_backend import tiny_backend

pytest.importorskip("triton", reason="triton, the gpu extra, is not installed: the wiring of kernels is not tested")
with pytest.MonkeyPatch.context() as patch:  # the variable is read when the kernels are defined
    patch.setenv("TRITON_INTERPRET", "1")
    import kvcomm.rope.triton_linear  # noqa: F401

DTYPES = list(TOLERANCES)
SPARE = 3  # tokens of the buffer before and after the segment
# Plain torch and the kernel round once each; the interpreter cuts bfloat16 off, which is one rounding more. Sums of
# 2 head_dim products in float32 are a few roundings more.
LIMITS = {dtype: tolerance.once * (3 if dtype == torch.bfloat16 else 2) for dtype, tolerance in TOLERANCES.items()}
SHAPES = [(1, 1, 3, 64, 64, False), (2, 63, 1, 60, 60, True), (3, 65, 3, 80, 48, False), (2, 33, 2, 128, 128, False)]


def spec_of(rope: RopeSpec, heads: int, head_dim: int, dtype: torch.dtype) -> ModelSpec:
    layers = len(rope.layers)
    name = str(dtype).removeprefix("torch.")
    fingerprint = ModelFingerprint("test", "w", rope.digest, name, "", "t", layers, heads, head_dim)
    return ModelSpec(fingerprint, rope, (None,) * layers, 4096, torch.device("cpu"), 128)


def random_kv(spec: ModelSpec, tokens: int, seed: int) -> SegmentKV:
    f = spec.fingerprint
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, f.n_layers, f.n_kv_heads, tokens, f.head_dim, generator=generator)
    return SegmentKV(*kv.to(f.torch_dtype))


def taught(spec: ModelSpec, pair: Pair) -> OffsetBook:
    """A book whose estimates for ``pair`` are known to help: the context turns values around and adds a constant."""
    book = OffsetBook(spec.fingerprint)
    for seed in range(3):
        base = random_kv(spec, 40, seed)
        true = SegmentKV(base.keys + 0.5 * base.values + 0.25, base.values - 0.75 * base.keys.flip(-1))
        book.learn([Observation(pair, base, true)])
    return book


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels move KV on the CPU; yields the names of what they did. New memory is full of NaN meanwhile."""
    done: list[str] = []

    def watched(name: str) -> Any:
        work = getattr(fused, name)

        def run(*arguments: Any) -> Any:
            done.append(name)
            return work(*arguments)

        return run

    for name in ("place", "cut"):
        monkeypatch.setattr(fused, name, watched(name))
    monkeypatch.setattr(fused, "handles", lambda spec, device: True)
    torch.use_deterministic_algorithms(True)  # with it, torch.empty gives NaN
    yield done
    torch.use_deterministic_algorithms(False)


def poisoned(spec: ModelSpec, tokens: int) -> KVBuffer:
    buffer = KVBuffer(spec, tokens + 2 * SPARE)
    buffer.keys.fill_(torch.nan)
    buffer.values.fill_(torch.nan)
    return buffer


def check(buffer: KVBuffer, plain: KVBuffer, tokens: int, slack: float = 1) -> None:
    """Both hold nearly the same at the segment's place and nothing elsewhere."""
    for got, want in ((buffer.keys, plain.keys), (buffer.values, plain.values)):
        inside, wanted = (part[:, :, SPARE : SPARE + tokens] for part in (got, want))
        near(inside, wanted, slack)
        assert int(got.isnan().sum()) == got.numel() - inside.numel()


@pytest.fixture(autouse=True)
def float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same map on every CPU, whatever it multiplies fast."""
    monkeypatch.setattr(offsets, "_bfloat16_is_fast", lambda: False)


def near(got: Tensor, want: Tensor, slack: float = 1) -> None:
    difference = float((got.double() - want.double()).abs().max())
    assert difference <= slack * LIMITS[want.dtype] * float(want.double().abs().max())  # NaN is not


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("layers", "tokens", "heads", "dim", "turned", "interleaved"), SHAPES)
def test_equals_plain_torch(
    layers: int,
    tokens: int,
    heads: int,
    dim: int,
    turned: int,
    interleaved: bool,
    dtype: torch.dtype,
    by_kernel: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Splice without an offset and with one, and cut."""
    spec = spec_of(make_spec(layers, dim, rotary_dim=turned, interleaved=interleaved), heads, dim, dtype)
    base = random_kv(spec, tokens, 1)
    for offset in (None, random_kv(spec, tokens, 2)):
        found, plain = poisoned(spec, tokens), poisoned(spec, tokens)
        splice(found, spec, base, SPARE, offset)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "handles", lambda spec, device: False)
            splice(plain, spec, base, SPARE, offset)
        check(found, plain, tokens)
        plain.length = SPARE + tokens
        got = cut(plain, spec, SPARE, SPARE + tokens)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "handles", lambda spec, device: False)
            want = cut(plain, spec, SPARE, SPARE + tokens)
        near(got.keys, want.keys)
        assert torch.equal(got.values, want.values)
        assert got.keys.untyped_storage().nbytes() == got.keys.nbytes
    assert by_kernel == ["place", "cut"] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_map_is_applied_on_the_way(dtype: torch.dtype, by_kernel: list[str], monkeypatch: Any) -> None:
    """What a book has learned, handed over as a map, gives what its materialised offset gives; seen and unseen pairs,
    and tokens beyond every bucket that was observed.
    """
    spec = spec_of(make_spec(3, 24), 2, 24, dtype)
    pair = Pair("prompt", "a/x", "b/y")
    book = taught(spec, pair)
    for used in (pair, Pair("prompt", "a/x", "c/z")):
        base = random_kv(spec, 70, 9)
        mapped, offset = book.linear(used, base), book.estimate(used, base)
        assert mapped is not None and offset is not None
        assert float(offset.keys[1:].float().norm() / base.keys[1:].float().norm()) > 0.2
        found, plain = poisoned(spec, 70), poisoned(spec, 70)
        splice(found, spec, base, SPARE, mapped)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "handles", lambda spec, device: False)
            splice(plain, spec, base, SPARE, offset)
            mapped_by_torch = poisoned(spec, 70)
            splice(mapped_by_torch, spec, base, SPARE, mapped)
        check(found, plain, 70, slack=4)  # the materialised offset is rounded before it is added
        check(found, mapped_by_torch, 70, slack=2)
    assert by_kernel == ["place"] * 2


def test_a_map_where_an_offset_would_not_help_is_none() -> None:
    spec = spec_of(make_spec(3, 24), 2, 24, torch.float32)
    pair, base = Pair("prompt", "a/x", "b/y"), random_kv(spec, 5, 1)
    book = OffsetBook(spec.fingerprint)
    assert book.linear(pair, base) is None  # nothing observed
    book.learn([Observation(pair, base, random_kv(spec, 5, 2))])
    assert book.linear(pair, base) is None  # never tested
    assert taught(spec, pair).linear(pair, random_kv(spec, 0, 1)) is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere", "smollm3", "phi3", "deepseek_v3"])
def test_a_whole_plan(family: str, by_kernel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, splice with a learned map, recompute: the same logits and KV by kernel and by plain torch."""
    case = make_case(tiny_backend(family), LENGTHS, (11, 30))
    book = OffsetBook(case.backend.spec.fingerprint)
    held = [part for part in case.plan.parts if part.base is not None and part.pair is not None]
    for _ in range(2):
        for part, true in zip(held, case.true, strict=True):
            book.learn([Observation(part.pair, part.base.kv, true)])
    assert all(book.linear(part.pair, part.base.kv) is not None for part in held)
    by_kernel.clear()
    buffer, logits, spliced = case.run(book, case.reused[:5])
    assert by_kernel == ["place"] * 2 * len(held)
    monkeypatch.setattr(fused, "handles", lambda spec, device: False)
    plain, wanted, expected = case.run(book, case.reused[:5])
    for part in held:
        at = slice(part.start, part.stop)
        assert state_error(*([(k[:, :, at], v[:, :, at]) for k, v in state] for state in (spliced, expected))) < 1e-5
    assert state_error(state_of(buffer, len(case.ids)), state_of(plain, len(case.ids))) < 1e-4
    near(logits, wanted, slack=100)


SPEC = spec_of(make_spec(2, 24, interleaved=True), 2, 24, torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_are_proven_before_use(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert fused._prove(spec_of(make_spec(3, 40, rotary_dim=24), 2, 40, dtype), CPU)
    assert fused._prove(spec_of(make_spec(1, 16), 1, 16, dtype), CPU)
    assert caplog.records == []


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = fused.move.place

    def shifted(base: Any, target: Any, positions: Tensor, spec: RopeSpec, **rest: Any) -> None:
        right(base, target, positions + 1, spec, **rest)

    monkeypatch.setattr(fused.move, "place", shifted)
    assert not fused._prove(SPEC, CPU)
    monkeypatch.setattr(fused.move, "place", lambda *_, **__: None)  # writes nothing: NaN stays
    assert not fused._prove(SPEC, CPU)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "differ from plain torch" in caplog.text


def test_without_kernels_plain_torch_moves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(fused.move, "cut", fail)
    assert not fused._prove(SPEC, CPU)
    assert "kernels fail on cpu" in caplog.text and "out of resources" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fused._prove(SPEC, CPU)
    assert "triton is not installed" in caplog.text


def test_chosen_by_device_and_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(fused, "_usable", type(fused._usable)())
    monkeypatch.setattr(fused, "_prove", lambda spec, device: not asked.append(device))
    assert not fused.handles(SPEC, CPU) and asked == []
    assert fused.handles(SPEC, torch.device("cuda", 0)) and fused.handles(SPEC, torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]
