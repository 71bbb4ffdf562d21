"""An engine on a store: a second engine reuses what the first computed and learned, and faults cost reuse alone."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomm import Dense, Engine, Exact, Slot, System
from kvcomm.anchors.saved import Learned, dump, restore
from kvcomm.anchors.stored import StoredPool
from kvcomm.errors import CorruptEntry, InvalidInput, StoreError
from kvcomm.store import DiskStore, MemoryStore, TieredStore
from kvcomm.store.faults import HookedFiles
from tests.hf.engines import PLAIN
from tests.tiny_models import FAMILIES

Model = tuple[PreTrainedModel, PreTrainedTokenizerBase]
TASKS = [f"Return the {n} largest numbers of a list without sorting it." for n in ("two", "three", "four")]
PARTS = [System("You write code."), "Task: ", Slot("task"), "\nPlan: ", Slot("plan"), "\nWrite the code now."]
PLAN = "Walk through the list once and keep the largest numbers seen so far in a small heap."


@pytest.fixture(scope="module")
def tiny(smollm: Model) -> Model:
    """A tiny model under the real tokenizer's ids: shapes are small, texts are real."""
    _, tokenizer = smollm
    model = FAMILIES["llama"]()
    model.resize_token_embeddings(len(tokenizer))
    return model.eval(), tokenizer


def teach(engine: Engine) -> None:
    agent = engine.agent("coder", PARTS)
    for task in TASKS:
        agent.study(task=task, plan=PLAN)


def test_second_engine_reuses_and_knows_what_the_first_did(tiny: Model, tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store, Engine(*tiny, store=store, policy=PLAIN) as first:
        teach(first)
        warm = first.agents["coder"].generate(task=TASKS[0], plan=PLAN, max_new_tokens=4, options={"do_sample": False})
        learned = first.book.statistics.digest()
    with DiskStore(tmp_path) as store:
        second = Engine(*tiny, store=store, learn=False, policy=PLAIN)
        assert second.book.statistics.digest() == learned
        agent = second.agent("coder", PARTS)
        reply = agent.generate(task=TASKS[0], plan=PLAN, max_new_tokens=4, options={"do_sample": False})
        assert reply.usage.cached_tokens > 0.5 * reply.usage.prompt_tokens
        assert reply.usage == warm.usage
        assert reply.token_ids == warm.token_ids


def test_learning_of_several_engines_adds(tiny: Model, tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        engines = [Engine(*tiny, store=store, policy=PLAIN) for _ in range(2)]
        for engine in engines:
            teach(engine)
            engine.flush()
            engine.flush()  # nothing new: nothing is added twice
        both = Engine(*tiny, store=store, policy=PLAIN).book
    for pair, sums in engines[0].book.statistics.pairs.items():
        other = engines[1].book.statistics.pairs[pair]
        assert torch.equal(both.statistics.pairs[pair].calls, sums.calls + other.calls)


def test_other_namespace_and_other_model_find_nothing(tiny: Model, tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        with Engine(*tiny, store=store, policy=PLAIN) as first:
            teach(first)
        other_model = FAMILIES["llama"]()
        other_model.resize_token_embeddings(len(tiny[1]))
        with torch.no_grad():
            other_model.get_output_embeddings().weight[0, 0] += 1
        for engine in (
            Engine(*tiny, store=store, namespace="other", policy=PLAIN),
            Engine(other_model.eval(), tiny[1], store=store),
        ):
            prompt = engine.agent("coder", PARTS).prompt(task=TASKS[0], plan=PLAN)
            assert engine.prefill(prompt, room=1).plan.counts.new == len(prompt)
            assert not engine.book.statistics.pairs


def test_tiered_store_serves_the_engine(tiny: Model, tmp_path: Path) -> None:
    with TieredStore([MemoryStore(max_bytes=64 << 20), DiskStore(tmp_path)]) as store:
        with Engine(*tiny, store=store, policy=PLAIN) as first:
            teach(first)
        second = Engine(*tiny, store=store, learn=False, policy=PLAIN)
        prompt = second.agent("coder", PARTS).prompt(task=TASKS[1], plan=PLAN)
        assert second.prefill(prompt, room=1).plan.counts.approximate > 0


def test_full_disk_costs_reuse_and_nothing_else(tiny: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = {"now": False}

    def hook(operation: str, when: str) -> None:
        if full["now"] and operation == "write" and when == "before":
            raise OSError(errno.ENOSPC, "no space left on device")

    options = {"do_sample": False}
    with DiskStore(tmp_path, files=HookedFiles(hook)) as store:
        engine = Engine(*tiny, store=store, policy=Exact())
        full["now"] = True
        agent = engine.agent("coder", PARTS)
        for task in TASKS:
            dense = agent.generate(task=task, plan=PLAN, max_new_tokens=4, policy=Dense(), options=options)
            exact = agent.generate(task=task, plan=PLAN, max_new_tokens=4, options=options)
            assert exact.token_ids == dense.token_ids
        assert isinstance(engine.pool, StoredPool)
        assert engine.pool.faults > 0
        assert "keeping a base failed" in caplog.text
        full["now"] = False
    with DiskStore(tmp_path) as store:
        assert not list(store.entries())


def test_learned_offsets_that_could_not_be_saved_are_saved_next_time(tiny: Model, tmp_path: Path) -> None:
    full = {"now": False}

    def hook(operation: str, when: str) -> None:
        if full["now"] and operation == "write" and when == "before":
            raise OSError(errno.ENOSPC, "no space left on device")

    with DiskStore(tmp_path, files=HookedFiles(hook)) as store:
        engine = Engine(*tiny, store=store, policy=PLAIN)
        teach(engine)
        full["now"] = True
        with pytest.raises(StoreError):
            engine.flush()
        full["now"] = False
        engine.flush()
        assert Engine(*tiny, store=store, policy=PLAIN).book.statistics.digest() == engine.book.statistics.digest()


def test_store_beside_a_pool_is_refused(tiny: Model) -> None:
    engine = Engine(*tiny, policy=PLAIN)
    with pytest.raises(InvalidInput, match="not both"):
        Engine(*tiny, pool=engine.pool, store=MemoryStore(max_bytes=1 << 20))


def test_learned_offsets_survive_the_round_trip_and_nothing_else_is_read(tiny: Model) -> None:
    engine = Engine(*tiny, policy=PLAIN)
    teach(engine)
    learned = Learned(engine.book.statistics, engine.book.gains)
    fingerprint = engine.pool.fingerprint
    data = dump(learned)
    back = restore(data, fingerprint)
    assert back.statistics.digest() == learned.statistics.digest()
    assert {p: g.calls for p, g in back.gains.items()} == {p: g.calls for p, g in learned.gains.items()}
    broken: list[Any] = [b"", data[:-1], data[:40], b"\x80\x04K\x01.", data.replace(b"F64", b"F32")]
    for raw in broken:
        with pytest.raises(CorruptEntry):
            restore(raw, fingerprint)
