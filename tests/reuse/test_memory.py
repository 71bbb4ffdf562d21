"""Memory of finished requests: it comes back when nobody holds it, is bounded, and nobody sees what another left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from kvcomm import Balanced, Dense, Engine, Fast, Segment
from kvcomm.errors import InvalidInput
from kvcomm.hf.reply import Prefilled
from kvcomm.reuse.memory import BufferMemory
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.select import Leading
from tests.hf.engines import GREEDY, engine_of, two_agents

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Blocks must come back by reference counts, not when a collector happens to run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_block_comes_back_with_its_last_view_and_not_before() -> None:
    memory = BufferMemory()
    tensor = memory.take(5 * MIB)
    where = address(tensor)
    view = tensor.view(torch.float32)[10:20].view(2, 5).T
    array = view.numpy()
    del tensor
    assert memory.idle_bytes == 0
    del view
    assert memory.idle_bytes == 0
    assert address(memory.take(5 * MIB)) != where
    del array
    assert memory.idle_bytes == 2 * 6 * MIB
    again = [memory.take(5 * MIB) for _ in range(3)]
    assert where in [address(tensor) for tensor in again] and memory.idle_bytes == 0


def test_idle_bytes_are_bounded_and_the_oldest_leave_first() -> None:
    memory = BufferMemory(max_idle_bytes=10 * MIB)
    held = [memory.take(size * MIB) for size in (4, 6, 4)]
    newest = address(held[2])
    while held:
        del held[0]
        assert memory.idle_bytes <= 10 * MIB
    assert memory.idle_bytes == 10 * MIB
    assert address(memory.take(4 * MIB)) == newest
    memory.drop_idle()
    assert memory.idle_bytes == 0
    memory.take(12 * MIB)
    assert memory.idle_bytes == 0 and BufferMemory(0).take(8).shape == (8,)


def test_the_smallest_block_that_fits_is_taken_and_none_much_too_large() -> None:
    memory = BufferMemory()
    large, small = memory.take(32 * MIB), memory.take(16 * MIB)
    wanted = address(small)
    del large, small
    assert address(memory.take(15 * MIB)) == wanted
    memory.take(2 * MIB).fill_(1)
    assert memory.idle_bytes == (32 + 16 + 2) * MIB


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(InvalidInput, match="max_idle_bytes is -1"):
        BufferMemory(-1)


def test_threads_never_hold_the_same_block() -> None:
    memory, failures = BufferMemory(), []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = memory.take(3 * MIB)[:4096]
            tensor.fill_(mark)
            if not bool((tensor == mark).all()):
                failures.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and memory.idle_bytes <= memory.max_idle_bytes


def poison(engine: Engine, tokens: int) -> int:
    """Leave NaN in the memory that the next call takes, which is all that is kept; where it lies."""
    memory = engine.backend.memory
    memory.drop_idle()
    buffer = engine.backend.buffer(tokens)
    buffer.keys.fill_(torch.nan)
    buffer.values.fill_(torch.nan)
    return address(buffer.keys)


@pytest.mark.parametrize(
    "policy", [Dense(), Fast(), Balanced(gate=False, learn_first=0)], ids=lambda p: type(p).__name__
)
def test_nothing_of_another_call_is_in_a_buffer(policy: Dense | Fast) -> None:
    engine = engine_of()
    writer, critic = two_agents(engine)
    writer.generate(task="a task of some length", max_new_tokens=4, options=GREEDY)
    prompt = critic.prompt(task="a task of some length", draft="a draft that nobody has seen before")
    where = poison(engine, len(prompt) + 8)
    held = engine.fork().prefill(prompt, room=8, policy=policy).buffer
    assert address(held.keys) == where
    assert bool(torch.isfinite(held.keys).all()) and bool(torch.isfinite(held.values).all())
    assert not bool(held.keys[:, :, len(prompt) :].any()) and not bool(held.values[:, :, len(prompt) :].any())


def test_a_prefill_that_is_held_is_not_written_over() -> None:
    engine = engine_of()
    writer, _ = two_agents(engine)
    held = engine.prefill(writer.prompt(task="the first"), policy=Dense(), room=8)
    output = engine.model.generate(  # type: ignore[operator]
        **held.generate_kwargs(), max_new_tokens=4, return_dict_in_generate=True, **GREEDY
    )
    layers = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    kept = [(keys.clone(), values.clone()) for keys, values in layers]
    del held, output
    for word in ("another", "one more"):
        writer.generate(task=word, max_new_tokens=6, options=GREEDY, policy=Dense())
    for (keys, values), (before_k, before_v) in zip(layers, kept, strict=True):
        assert torch.equal(keys, before_k) and torch.equal(values, before_v)


def test_equal_calls_take_the_same_memory_and_give_the_same_answer() -> None:
    engine = engine_of(learn=False)
    writer, _ = two_agents(engine)
    first = writer.generate(task="say it", max_new_tokens=6, options=GREEDY)
    assert engine.backend.memory.idle_bytes
    before = engine.backend.memory.idle_bytes
    second = writer.generate(task="say it", max_new_tokens=6, options=GREEDY)
    assert first.token_ids == second.token_ids and engine.backend.memory.idle_bytes == before


def test_a_call_that_fails_leaves_its_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    writer, critic = two_agents(engine)
    writer.generate(task="x y z", max_new_tokens=4, options=GREEDY)
    engine.backend.memory.drop_idle()

    def fail(*given: object, **more: object) -> None:
        raise RuntimeError("a layer failed")

    monkeypatch.setattr(engine.backend, "forward", fail)
    policy = Reuse(select=Leading(0), dense_above=1.0, learn_first=0)
    with pytest.raises(RuntimeError, match="a layer failed"):
        engine.prefill(critic.prompt(task="x y z", draft=Segment((50, 51, 52))), policy=policy)
    gc.collect()  # the exception's frames held it
    assert engine.backend.memory.idle_bytes


def test_prefilled_alone_keeps_its_memory() -> None:
    engine = engine_of()
    writer, _ = two_agents(engine)
    held: Prefilled = engine.prefill(writer.prompt(task="mine"), policy=Dense())
    engine.backend.memory.drop_idle()
    where = address(held.buffer.keys)
    assert address(engine.backend.buffer(8).keys) != where
    engine.backend.memory.drop_idle()
    del held
    assert address(engine.backend.buffer(8).keys) == where
