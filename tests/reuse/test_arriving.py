"""Bases on their way: spliced layer by layer as whole ones are, used before they are whole, never used when lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm import Balanced, Engine, Exact, Fast
from kvcomm.anchors import stored
from kvcomm.anchors.arriving import ArrivalLost, ArrivingKV
from kvcomm.errors import CorruptEntry, InvalidInput, StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.reuse.arriving import Coming, Filling
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.select import Attended, Deviation, Leading
from kvcomm.reuse.splice import splice
from kvcomm.rope.view import LinearMap
from kvcomm.store.base import Deadline, Handle
from kvcomm.store.memory import MemoryStore
from kvcomm.transfer.remote import RemoteStore
from kvcomm.types import SegmentKV
from tests.hf.engines import GREEDY, answer, engine_of, two_agents
from tests.reuse.scene import backend_of
from tests.serve.here import cut_at, proxied

TASK, DRAFT = "Sort a list of numbers without sort.", "Take the least one again and again, and put it to the end."
Room = tuple[torch.Tensor, torch.Tensor]


class Given(Handle):
    """A handle whose layers come one by one; ``before`` is called ahead of each, and may wait or raise."""

    arrives = True

    def __init__(self, inner: Handle, before: Callable[[CacheKey, int, Room], None]) -> None:
        self.inner, self.before = inner, before
        self.key, self.segment, self.attributes = inner.key, inner.segment, inner.attributes
        self.encoding, self.nbytes, self.expires_s = inner.encoding, inner.nbytes, inner.expires_s

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.inner.layer_into(layer, keys, values)

    def read_layers(self, rooms: Sequence[Room], deadline: Deadline) -> Iterator[int]:
        for layer in super().read_layers(rooms, deadline):
            self.before(self.key, layer, rooms[layer])
            yield layer

    def release(self) -> None:
        self.inner.release()


class GivingStore(MemoryStore):
    """A store in memory that looks like a remote one."""

    before: Callable[[CacheKey, int, Room], None] = staticmethod(lambda key, layer, room: None)

    def get(self, key: CacheKey, **options: Any) -> Handle | None:
        found = super().get(key, **options)
        return None if found is None else Given(found, self.before)


def filled_store() -> GivingStore:
    """What an engine put that ran both agents."""
    store = GivingStore(64 << 20)
    engine = engine_of(store=store, policy=Exact())
    writer, critic = two_agents(engine)
    writer.generate(task=TASK, max_new_tokens=2, options=GREEDY)
    critic.generate(task=TASK, draft=DRAFT, max_new_tokens=2, options=GREEDY)
    return store


@pytest.fixture(scope="module")
def store() -> GivingStore:
    return filled_store()


def engine_with(store: GivingStore, **options: Any) -> Engine:
    return engine_of(store=store, learn=False, **options)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "smollm3", "cohere"])
@pytest.mark.parametrize("kind", ["none", "added", "linear"])
def test_layer_by_layer_is_whole_bit_for_bit(family: str, kind: str) -> None:
    spec = backend_of(family).spec
    f, tokens, start = spec.fingerprint, 37, 5
    shape = (4, f.n_layers, f.n_kv_heads, tokens, f.head_dim)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(f.torch_dtype)
    offset: SegmentKV | LinearMap | None = None
    if kind == "added":
        offset = SegmentKV(kv[2], kv[3])
    elif kind == "linear":
        width = 2 * f.head_dim
        weights = torch.randn(f.n_layers - 1, f.n_kv_heads, width, width) / width**0.5
        intercept = torch.randn(f.n_layers - 1, f.n_kv_heads, 3, width)
        offset = LinearMap(weights, intercept, torch.arange(tokens) % 3, torch.rand(f.n_layers - 1, 2))
    whole, parts = (KVBuffer(spec, tokens + 9) for _ in range(2))
    for buffer in (whole, parts):
        buffer.clear(0, buffer.capacity)
    splice(whole, spec, SegmentKV(kv[0], kv[1]), start, offset)
    arriving = ArrivingKV(f, tokens, Deadline(10.0))
    filling = Filling(parts, spec, [Coming(arriving, start, offset)])
    for layer, (keys, values) in enumerate(arriving.rooms):
        keys.copy_(kv[0, layer])
        values.copy_(kv[1, layer])
        arriving.arrive()
        filling(layer)
    assert torch.equal(whole.keys, parts.keys) and torch.equal(whole.values, parts.values)
    assert torch.equal(arriving.keys, kv[0]) and torch.equal(arriving.values, kv[1])


def test_a_layer_comes_after_the_one_before_it_was_computed(store: GivingStore) -> None:
    engine = engine_with(store, policy=Exact())
    layers = engine.model.base_model.layers
    done = [threading.Event() for _ in layers]
    for event, layer in zip(done, layers, strict=True):
        layer.register_forward_hook(lambda *_, event=event: event.set())
    waited: list[int] = []

    def before(key: CacheKey, layer: int, room: Room) -> None:
        if layer:
            assert done[layer - 1].wait(5.0)
            waited.append(layer)

    writer, _ = two_agents(engine)
    prompt = writer.prompt(task=TASK + " And say what it costs.")  # its head is held, the rest is computed
    expected = answer(engine, prompt, 4)
    for event in done:
        event.clear()
    store.before = before  # type: ignore[method-assign]
    try:
        reply = engine.generate(prompt, max_new_tokens=4, **GREEDY)
    finally:
        del store.before
    assert reply.token_ids == expected and reply.usage.exact
    assert set(waited) == set(range(1, len(layers)))
    assert engine.pool.faults == 0  # type: ignore[attr-defined]


FAULTS = {
    "lost": StoreUnavailable("the connection was cut"),
    "corrupt": CorruptEntry("a frame fails its checksum"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layer", range(3))
def test_lost_at_any_layer_means_computed(store: GivingStore, layer: int, fault: str) -> None:
    engine = engine_with(store, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task=TASK)
    lost = prompt.parts[-2].segment

    def before(key: CacheKey, at: int, room: Room) -> None:
        if key.content == lost.digest and key.recipe.context == "writer/task" and at == layer:
            room[0].fill_(7.0)
            raise FAULTS[fault]

    expected = answer(engine, prompt, 6)
    store.before = before  # type: ignore[method-assign]
    try:
        reply = engine.generate(prompt, max_new_tokens=6, **GREEDY)
    finally:
        del store.before
    assert reply.token_ids == expected
    assert 0 < reply.usage.exact <= prompt.starts[-2]
    assert engine.pool.faults == 1  # type: ignore[attr-defined]
    places = [key.recipe.context for key in tuple(engine.pool._arriving) if key.content == lost.digest]
    assert "writer/task" not in places


POLICIES: list[Reuse] = [
    Fast(learn_first=0),
    Balanced(gate=False, learn_first=0, select=Leading(4)),
    Balanced(gate=False, learn_first=0, dense_above=1.0, select=Attended(0.2)),
    Balanced(gate=False, learn_first=0, dense_above=1.0, select=Deviation(0.2)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy.select).__name__)
def test_every_selection_gives_what_it_gives_with_bases_at_hand(store: GivingStore, policy: Any) -> None:
    def slowly(key: CacheKey, layer: int, room: Room) -> None:
        time.sleep(0.02)

    found: list[tuple[tuple[int, ...], Any, KVBuffer, Plan]] = []
    for before in (None, slowly):
        engine = engine_with(store, policy=policy)
        _, critic = two_agents(engine)
        prompt = critic.prompt(task=DRAFT, draft=TASK)
        if before is None:
            for part in prompt.parts:
                for base in engine.pool.bases(part.segment):
                    assert len(base.kv.keys)  # waits
        else:
            store.before = before  # type: ignore[method-assign]
        try:
            prefilled = engine.prefill(prompt)
        finally:
            store.__dict__.pop("before", None)
        found.append((prompt.token_ids, prefilled.plan.counts, prefilled.buffer, prefilled.plan))
    (_, counts, whole, _), (_, later, parts, _) = found
    assert counts == later and counts.approximate
    filled = whole.length
    assert torch.equal(whole.keys[:, :, :filled], parts.keys[:, :, :filled])
    assert torch.equal(whole.values[:, :, :filled], parts.values[:, :, :filled])


def test_silence_ends_at_the_deadline(store: GivingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "DEFAULT_DEADLINE_S", 0.5)
    engine = engine_with(store, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task=TASK)
    expected = answer(engine, prompt, 3)
    silence = threading.Event()
    store.before = lambda key, layer, room: silence.wait(60.0) and None  # type: ignore[method-assign]
    try:
        began = time.monotonic()
        reply = engine.generate(prompt, max_new_tokens=3, **GREEDY)
        took = time.monotonic() - began
    finally:
        silence.set()
        del store.before
    assert reply.token_ids == expected and reply.usage.exact == 0
    assert 0.5 <= took < 20.0


def test_nan_on_the_way_is_not_used(store: GivingStore, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(store, policy=Exact())
    writer, _ = two_agents(engine)
    prompt = writer.prompt(task=TASK)
    expected = answer(engine, prompt, 3)

    def spoil(key: CacheKey, layer: int, room: Room) -> None:
        room[1][..., -1].fill_(torch.nan)

    store.before = spoil  # type: ignore[method-assign]
    try:
        reply = engine.generate(prompt, max_new_tokens=3, **GREEDY)
    finally:
        del store.before
    assert reply.token_ids == expected and reply.usage.exact == 0
    assert "NaN" in caplog.text


def test_arriving_kv_by_itself() -> None:
    fingerprint = backend_of("llama").spec.fingerprint
    kv = ArrivingKV(fingerprint, 3, Deadline(0.2))
    ends: list[object] = []
    kv.at_end(ends.append)
    for room in kv.rooms[:2]:
        for part in room:
            part.fill_(1.0)
        kv.arrive()
    assert torch.equal(kv.layer(1).keys, torch.ones_like(kv.layer(1).keys)) and not kv.all_here
    with pytest.raises(ArrivalLost, match="deadline"):
        _ = kv.keys
    with pytest.raises(ArrivalLost, match="deadline"):
        kv.layer(0)  # what had come before is nobody's any more
    assert len(ends) == 1 and ends[0] is not None
    with pytest.raises(InvalidInput, match="NaN"):
        bad = ArrivingKV(fingerprint, 3, Deadline(0.2))
        bad.rooms[0][0].fill_(torch.inf)
        bad.rooms[0][1].fill_(0.0)
        bad.arrive()


def test_what_is_forgotten_on_its_way_does_not_stay(store: GivingStore) -> None:
    own = filled_store()
    engine = engine_with(own, policy=Exact())
    writer, _ = two_agents(engine)
    first = writer.prompt(task=TASK).parts[0].segment
    gate = threading.Event()
    own.before = lambda key, layer, room: gate.wait(10.0) and None  # type: ignore[method-assign]
    (base,) = engine.pool.bases(first)
    engine.forget(first)
    gate.set()
    assert len(base.kv.keys)  # waits
    del own.before
    assert engine.pool.bases(first) == [] and len(engine.pool) == 0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_a_real_connection_cut_in_the_middle(tmp_path: Path, share: float) -> None:
    with proxied(tmp_path) as (_, proxy):
        kept = RemoteStore(proxy.address)
        first = engine_of(store=kept, policy=Exact())
        prompt = two_agents(first)[0].prompt(task=TASK * 8)
        expected = first.generate(prompt, max_new_tokens=3, **GREEDY).token_ids
        second = engine_of(store=kept, policy=Exact(), learn=False)
        size = max(len(part.segment) for part in prompt.parts) * second.pool.fingerprint.bytes_per_token
        proxy.answers = cut_at(int(share * size))
        for client in kept._clients.values():  # so that each base comes over a connection that is cut
            for connection in client._idle:
                connection.wire.close()
        reply = second.generate(prompt, max_new_tokens=3, **GREEDY)
        assert reply.token_ids == expected
        assert reply.usage.exact < prompt.starts[-2] + len(prompt.parts[-2].segment)
        assert second.pool.faults >= 1  # type: ignore[attr-defined]
        kept.close()


def test_whoever_asks_after_the_end_is_told_at_once() -> None:
    """A base that is lost while a pool begins to expect it does not stay in that pool."""
    engine = engine_of()
    prompt = two_agents(engine)[0].prompt(task=TASK)
    part, fingerprint = prompt.parts[0], engine.pool.fingerprint
    kv = ArrivingKV(fingerprint, len(part.segment), Deadline(5.0))
    kv.lose(StoreUnavailable("gone"))
    assert engine.pool.expect(part.segment, Recipe("prompt", part.label, "", True), kv)
    assert not engine.pool._arriving and not engine.pool.bases(part.segment)
    assert engine.generate(prompt, max_new_tokens=3, **GREEDY).token_ids == answer(engine, prompt, 3)


def test_a_pool_that_fails_at_the_end_lets_nobody_wait() -> None:
    kv = ArrivingKV(engine_of().pool.fingerprint, 3, Deadline(30.0))

    def fails(error: Any) -> None:
        raise MemoryError

    kv.at_end(fails)
    with pytest.raises(MemoryError):
        kv.lose(StoreUnavailable("gone"))
    began = time.monotonic()
    with pytest.raises(ArrivalLost, match="gone"):
        kv.whole()
    assert time.monotonic() - began < 5.0
