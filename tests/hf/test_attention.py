"""Grouped attention over chosen positions equals the models' own masked attention, and is gone after each pass."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import transformers

from kvcomm.hf import attention
from kvcomm.hf.backend import HFBackend
from kvcomm.reuse.backend import KVBuffer
from tests.tiny_backend import backend_of, tiny_backend
from tests.tiny_models import FAMILIES, OWN_ATTENTION, _build

TOKENS = 120
IDS = [(11 * n + 5) % 128 for n in range(TOKENS)]
OTHER = [(7 * n + 3) % 128 for n in range(TOKENS)]
SPREADS = {
    "scattered": [p for p in range(TOKENS) if p % 3 != 1],
    "runs": [*range(4, 12), *range(50, 95), *range(100, 103)],
    "run": list(range(37, 80)),
    "tail": list(range(60, TOKENS)),
    "one": [77],
}


def recomputed(backend: HFBackend, grouped: bool, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """KV of the whole buffer and logits after other tokens were run at ``positions``."""
    buffer = KVBuffer(backend.spec, TOKENS)
    before = backend.grouped
    try:
        backend.grouped = False
        backend.forward(buffer, IDS, range(TOKENS), 0)
        backend.grouped = grouped
        logits = backend.forward(buffer, [OTHER[p] for p in positions], positions, len(positions))
    finally:
        backend.grouped = before
    return torch.stack([buffer.keys, buffer.values]), logits


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OWN_ATTENTION])
def test_equals_the_masked_path(family: str, spread: str) -> None:
    backend = tiny_backend(family)
    assert backend.grouped, "these families have plain softmax attention"
    kv, logits = recomputed(backend, False, SPREADS[spread])
    kv_grouped, logits_grouped = recomputed(backend, True, SPREADS[spread])
    torch.testing.assert_close(kv_grouped, kv, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_grouped, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_against_softmax_in_float64(heads: int, kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor(SPREADS["runs"])
    length, width = TOKENS, 20
    query = torch.randn(1, heads, len(positions), width, generator=generator)
    key, value = torch.randn(2, 1, kv_heads, length, width, generator=generator)
    module = torch.nn.Module()
    module.layer_idx = 1  # type: ignore[assignment]
    config = type("Config", (), {"_attn_implementation": "sdpa"})()
    watch = attention.Watch([0, 7, 8, 55], length, torch.device("cpu"))
    current = attention.Pass(positions, [None, window], torch.float32, watch)
    with attention.over(torch.nn.Module(), config, current):  # type: ignore[arg-type]
        out, _ = attention.positions_attention(module, query, key, value, None, scaling=0.3)
    keys = torch.arange(length)
    hidden = keys[None] > positions[:, None]
    if window is not None:
        hidden |= keys[None] <= positions[:, None] - window
    for head in range(heads):
        k, v = (t[0, head * kv_heads // heads].double() for t in (key, value))
        scores = (query[0, head].double() @ k.T * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(out[0, :, head].double(), scores @ v, rtol=1e-5, atol=1e-6)
        watch.total -= scores[watch.queries].float()
    assert watch.heads == heads
    assert float(watch.total.abs().max()) < 1e-5


def test_nothing_hidden_is_read() -> None:
    backend = tiny_backend("llama")
    buffer = KVBuffer(backend.spec, TOKENS)
    backend.forward(buffer, IDS, range(TOKENS), 0)
    clean = backend.forward(buffer, IDS[40:60], range(40, 60), 0), buffer.keys[:, :, 40:60].clone()
    buffer.keys[:, :, 60:], buffer.values[:, :, 60:] = float("nan"), float("nan")
    backend.forward(buffer, IDS[40:60], range(40, 60), 0)
    torch.testing.assert_close(buffer.keys[:, :, 40:60], clean[1])


def test_the_model_is_as_before_after_a_pass_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny_backend("llama")
    recomputed(backend, True, [3])
    assert backend.model.config._attn_implementation == "sdpa"

    def fail(**kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(backend.model.base_model, "forward", fail)
    buffer = KVBuffer(backend.spec, TOKENS)
    buffer.length = TOKENS
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.forward(buffer, [1], [3], 0)
    assert backend.model.config._attn_implementation == "sdpa"
    assert attention._active.get() is None


def test_another_thread_gets_plain_attention_during_a_pass() -> None:
    backend = backend_of(FAMILIES["mistral"]())
    model, ids = backend.model, torch.tensor([IDS])
    with torch.inference_mode():
        want = model(ids).logits
    found: list[torch.Tensor] = []

    def other() -> None:
        with torch.inference_mode():
            found.append(model(ids).logits)

    positions = torch.tensor([3, 4])
    with attention.over(model, model.config, attention.Pass(positions, backend.spec.windows, torch.float32)):
        assert model.config._attn_implementation == attention.NAME
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], want)


def test_passes_of_two_threads_overlap() -> None:
    backend = backend_of(FAMILIES["qwen2"]())
    want = {spread: recomputed(backend, True, SPREADS[spread])[0] for spread in ("runs", "scattered")}
    wrong: list[str] = []

    def work(spread: str) -> None:
        for _ in range(20):
            buffer = KVBuffer(backend.spec, TOKENS)
            backend.forward(buffer, IDS, range(TOKENS), 0)
            backend.forward(buffer, [OTHER[p] for p in SPREADS[spread]], SPREADS[spread], 0)
            if not torch.allclose(torch.stack([buffer.keys, buffer.values]), want[spread], rtol=1e-4, atol=1e-4):
                wrong.append(spread)

    threads = [threading.Thread(target=work, args=(spread,)) for spread in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend.model.config._attn_implementation == "sdpa"


def test_a_backend_can_be_built_while_another_thread_runs_a_pass() -> None:
    backend = backend_of(FAMILIES["llama"]())
    built: list[HFBackend] = []
    current = attention.Pass(torch.tensor([3, 4]), backend.spec.windows, torch.float32)
    with attention.over(backend.model, backend.model.config, current):
        thread = threading.Thread(target=lambda: built.append(backend_of(backend.model)))
        thread.start()
        thread.join()
        assert backend.model.config._attn_implementation == attention.NAME
    assert built[0].grouped
    assert built[0].spec.fingerprint == backend.spec.fingerprint
    assert backend.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", sorted(OWN_ATTENTION))
def test_caps_and_sinks_keep_the_models_own_path(family: str) -> None:
    """And are what the model computes: without them the KV is another."""
    backend = tiny_backend(family)
    assert not backend.grouped
    kv, _ = recomputed(backend, False, SPREADS["runs"])
    plain = FAMILIES[family]()
    if family == "gemma2":
        for layer in plain.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    else:
        for layer in plain.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)  # e to this is 0: no sink
    other, _ = recomputed(backend_of(plain), False, SPREADS["runs"])
    assert float((kv - other).norm() / kv.norm()) > 0.01


def test_softcapped_models_keep_their_own_path() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    backend = backend_of(
        _build("Gemma2", head_dim=16, layer_types=types, sliding_window=32, attn_logit_softcapping=5.0)
    )
    assert not backend.grouped
    kv, _ = recomputed(backend, False, SPREADS["runs"])
    dense = KVBuffer(backend.spec, TOKENS)
    ids = [OTHER[p] if p in SPREADS["runs"] else IDS[p] for p in range(TOKENS)]
    backend.forward(dense, ids[:5], range(5), 0)
    torch.testing.assert_close(kv[0][:, :, 4], dense.keys[:, :, 4], rtol=1e-4, atol=1e-4)


def test_eager_models_keep_their_own_path() -> None:
    model = FAMILIES["llama"]()
    model.set_attn_implementation("eager")
    backend = backend_of(model)
    assert not backend.grouped
    kv, _ = recomputed(backend, False, SPREADS["runs"])
    torch.testing.assert_close(kv, recomputed(tiny_backend("llama"), True, SPREADS["runs"])[0], rtol=1e-4, atol=1e-4)


def test_importing_registers_nothing() -> None:
    program = (
        "import kvcomm, kvcomm.hf.attention, transformers as t;"
        f"print({attention.NAME!r} in t.AttentionInterface(), {attention.NAME!r} in t.AttentionMaskInterface())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr
    tiny_backend("llama")
    assert attention.NAME in transformers.AttentionInterface()
    assert attention.NAME in transformers.AttentionMaskInterface()
