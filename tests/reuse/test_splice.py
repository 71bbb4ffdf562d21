"""The splice is right: against the model's own prefill and against a plain loop over single tokens, in every family."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcomm import rope
from kvcomm.anchors.book import OffsetBook
from kvcomm.errors import InvalidInput
from kvcomm.hf.backend import HFBackend
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.splice import cut, positions_of, splice
from kvcomm.rope.view import LinearMap
from kvcomm.types import SegmentKV
from tests.reuse.scene import (
    Case,
    backend_of,
    captured,
    case_of,
    dense,
    error,
    filled,
    make_case,
    one_by_one,
    state_error,
    state_of,
    tokens,
)
from tests.tiny_models import FAMILIES, as_held

TOLERANCES = {
    "tiny": 2e-5,  # relative, float32: three or four layers, each rounding differently when cut into other matmuls
    "real": 1e-4,  # thirty layers; a few activations of SmolLM2 are a thousand times the others
}
FAR = 0.02  # what a wrong position, mask or layer would do at least; re-rotation alone is further off than this
LENGTHS = (20, 37, 9, 30, 6)  # 102 tokens: three times the sliding windows, which are 32
AWAY = (11, 300)


@pytest.fixture(params=list(FAMILIES))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(backend_of(request.param), LENGTHS, AWAY)


def test_families_cover_what_matters() -> None:
    specs = [backend_of(family).spec for family in FAMILIES]
    assert any(s.fingerprint.n_kv_heads < backend_of("llama").model.config.num_attention_heads for s in specs)
    windows = [window for s in specs for window in s.windows if window is not None]
    assert windows and max(windows) < sum(LENGTHS) / 3
    assert any(len(set(s.windows)) == 2 for s in specs)


def check_true_offset(case: Case, tolerance: float) -> None:
    """(a): base plus the prompt's own true offset, nothing recomputed."""
    book = case.offsets()
    buffer, logits, _ = case.run(book, ())
    assert error(logits, case.logits[-1]) < tolerance
    assert state_error(state_of(buffer, len(case.ids)), case.state) < tolerance
    for offset in book.known.values():  # the first layer depends on the token alone
        assert float(offset.keys[0].abs().max()) < 1e-4 and float(offset.values[0].abs().max()) < 1e-5
        assert float(offset.keys[1:].abs().mean()) > 0.01
    _, bare, _ = case.run(OffsetBook(case.backend.spec.fingerprint), ())
    assert error(bare, case.logits[-1]) > FAR


def test_true_offset_gives_the_dense_logits(case: Case) -> None:
    check_true_offset(case, TOLERANCES["tiny"])


def test_a_segment_moves_back_to_where_it_came_from(case: Case) -> None:
    """Captured in this very prompt, at the same and at a later position of it, no offset is needed."""
    backend, ids = case.backend, case.ids
    buffer, whole = KVBuffer(backend.spec, len(ids)), filled(backend, ids)
    for start, stop in ((0, 20), (20, 57), (57, len(ids) - 1)):
        splice(buffer, backend.spec, cut(whole, backend.spec, start, stop), start)
    buffer.length = len(ids) - 1
    logits = backend.forward(buffer, ids[-1:], [len(ids) - 1], logits=1)[-1]
    assert error(logits, case.logits[-1]) < TOLERANCES["tiny"]


def check_subset(case: Case, chosen: list[int], tolerance: float) -> None:
    """(b): what is recomputed equals a plain loop over single tokens on the same spliced state."""
    book = OffsetBook(case.backend.spec.fingerprint)
    buffer, logits, state = case.run(book, chosen)
    new = {p for part in case.plan.parts if part.action == "new" for p in range(part.start, part.stop)}
    expected = one_by_one(case.backend, case.ids, state, sorted(new | set(chosen)))
    assert error(logits, expected) < tolerance
    assert state_error(state_of(buffer, len(case.ids)), state) < tolerance


@pytest.mark.parametrize("share", [0.0, 0.15, 0.6])
def test_recomputing_a_subset_is_a_plain_loop(case: Case, share: float) -> None:
    rng = random.Random(f"{share}")
    check_subset(case, [p for p in case.reused if rng.random() < share], TOLERANCES["tiny"])


def check_everything(case: Case, tolerance: float) -> None:
    """(c): recomputing everything is the dense run, whatever was spliced."""
    buffer, logits, spliced = case.run(OffsetBook(case.backend.spec.fingerprint), case.reused)
    assert error(logits, case.logits[-1]) < tolerance
    assert state_error(state_of(buffer, len(case.ids)), case.state) < tolerance
    start, stop = case.plan.parts[1].start, case.plan.parts[1].stop
    here = [(k[:, :, start:stop], v[:, :, start:stop]) for k, v in spliced]
    there = [(k[:, :, start:stop], v[:, :, start:stop]) for k, v in case.state]
    assert state_error(here, there) > FAR


def test_recomputing_everything_is_dense(case: Case) -> None:
    check_everything(case, TOLERANCES["tiny"])


def block_masks(backend: HFBackend, first: int, second: int) -> Any:
    """[1, 1, T, T] for each kind of layer: two blocks that do not see each other, causal and windowed within."""
    total, masks = first + second, {}
    kinds = getattr(backend.model.config, "layer_types", None) or ["all"] * len(backend.spec.windows)
    for kind, window in zip(kinds, backend.spec.windows, strict=True):
        seen = torch.zeros(total, total, dtype=torch.bool)
        for q in range(total):
            for k in range(total):
                seen[q, k] = (q < first) == (k < first) and k <= q and (window is None or q - k < window)
        masks[kind] = backend._as_mask(seen)  # eager attention adds it
    return masks if len(masks) > 1 else next(iter(masks.values()))


def check_block_diagonal(
    backend: HFBackend, before: tuple[int, ...], segment: tuple[int, ...], tolerance: float
) -> None:
    """(d): under a block-diagonal mask at p, the segment's KV is that of the segment alone, re-rotated to p."""
    cache, p, n = DynamicCache(), len(before), len(segment)
    with torch.inference_mode():
        backend.model(
            torch.tensor([[*before, *segment]]),
            attention_mask=block_masks(backend, p, n),
            position_ids=torch.arange(p + n)[None],
            past_key_values=cache,
            use_cache=True,
        )
    alone = captured(backend, (), segment)
    moved = rope.rotate(alone.keys, positions_of(p, n, alone.keys.device), backend.spec.rope)
    for index, layer in enumerate(cache.layers):
        assert layer.keys is not None and layer.values is not None
        keys, values = as_held(layer.keys, layer.values, backend.model)
        assert error(moved[index], keys[0, :, p:]) < tolerance
        assert error(alone.values[index], values[0, :, p:]) < tolerance
    behind = captured(backend, before, segment)
    assert error(behind.values[1:], alone.values[1:]) > FAR


@pytest.mark.parametrize("family", FAMILIES)
def test_block_diagonal_is_isolated_and_rotated(family: str) -> None:
    check_block_diagonal(backend_of(family), tokens(41, 1), tokens(45, 2), TOLERANCES["tiny"])


def test_on_the_real_model(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    backend = HFBackend(model, tokenizer, weights="real")
    texts = ["You review code. The task:\n", "def mean(xs):\n    return sum(xs) / len(xs)\n", "\nAnother's answer:\n"]
    texts += ["Guard against an empty list: return 0.0 when xs is empty.\n", "\nYour verdict:"]
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    before = tokenizer("An unrelated remark about the sea. ", add_special_tokens=False)["input_ids"]
    case = case_of(backend, pieces, [before, before * 6])
    tolerance = TOLERANCES["real"]
    check_true_offset(case, tolerance)
    check_subset(case, case.reused[:4] + case.reused[11:14] + case.reused[-1:], tolerance)
    check_everything(case, tolerance)
    check_block_diagonal(backend, tuple(before), tuple(pieces[1]), tolerance)


def test_backend_prefill_is_the_models_own(case: Case) -> None:
    buffer = KVBuffer(case.backend.spec, len(case.ids))
    logits = case.backend.forward(buffer, case.ids, range(len(case.ids)), logits=len(case.ids))
    assert error(logits, case.logits) < TOLERANCES["tiny"]


def test_a_splice_is_checked() -> None:
    backend = backend_of("llama")
    base = captured(backend, (), tokens(5, 1))
    buffer = KVBuffer(backend.spec, 8)
    buffer.keys.fill_(7.0)
    for start in (-1, 4):
        with pytest.raises(InvalidInput, match="outside the buffer of 8"):
            splice(buffer, backend.spec, base, start)
    with pytest.raises(InvalidInput, match="does not fit its base"):
        splice(buffer, backend.spec, base, 0, captured(backend, (), tokens(4, 1)))
    with pytest.raises(InvalidInput, match="compute it again"):
        splice(buffer, backend.spec, SegmentKV(base.keys.double(), base.values.double()), 0)
    with pytest.raises(InvalidInput, match="the base is on meta"):
        splice(buffer, backend.spec, SegmentKV(base.keys.to("meta"), base.values.to("meta")), 0)
    layers, heads, _, dim = base.keys.shape
    for tokens_of, width, more in ((4, 2 * dim, 0), (5, dim, 0), (5, 2 * dim, 1)):
        weights, buckets = torch.zeros(layers + more, heads, width, width), torch.zeros(tokens_of, dtype=torch.int64)
        mapped = LinearMap(weights, torch.zeros(layers + more, heads, 1, width), buckets)
        with pytest.raises(InvalidInput, match="a linear map of weights .* does not fit its base"):
            splice(buffer, backend.spec, base, 0, mapped)
    assert bool((buffer.keys == 7.0).all())
    with pytest.raises(InvalidInput, match="not all filled"):
        cut(buffer, backend.spec, 0, 1)
    buffer.length = 8
    assert len(cut(buffer, backend.spec, 3, 3)) == 0
    assert len(dense(backend, tokens(3, 1))[1]) == backend.spec.fingerprint.n_layers


def test_cutting_copies() -> None:
    backend = backend_of("llama")
    buffer = filled(backend, tokens(6, 1))
    held = cut(buffer, backend.spec, 2, 5)
    before = held.keys.clone(), held.values.clone()
    buffer.keys.zero_()
    buffer.values.zero_()
    assert torch.equal(held.keys, before[0]) and torch.equal(held.values, before[1])
    assert held.keys.untyped_storage().nbytes() == held.keys.nbytes  # no hold on the request's memory
