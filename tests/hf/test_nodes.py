"""Engines that meet in a service: merged offsets, news, claims, and what a silent service may cost a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm import Engine, Exact, Slot
from kvcomm.anchors.saved import Learned
from kvcomm.anchors.saving import SavedSums
from kvcomm.anchors.stored import StoredPool
from kvcomm.closeness import kl_divergence
from kvcomm.serve.service import Service
from kvcomm.store.coordinator import Terms
from kvcomm.transfer.remote import RemoteStore
from tests.hf.engines import GREEDY, answer, engine_of
from tests.serve.here import counted_calls, proxied, service_here

PARTS = ["You write. Task: ", Slot("task"), "\nPlan: ", Slot("plan"), "\nWrite:"]
PLAN = "Walk once through the list, keep the largest numbers, and say what it costs."
TASKS = [f"Find the {n} largest numbers of a list in one pass." for n in ("two", "three", "four", "five")]
TERMS = Terms(silence_s=5.0, claim_tokens=16, claim_s=4.0)
SILENT = Terms(silence_s=0.5, claim_tokens=16, claim_s=4.0)


def node(address: str, name: str, terms: Terms = TERMS, **options: Any) -> Engine:
    """An engine with a store of its own, as another process would have it."""
    return engine_of(store=RemoteStore(address, terms=terms, node=name), **options)


def study(engine: Engine, *tasks: str) -> None:
    agent = engine.agents.get("writer") or engine.agent("writer", PARTS)
    for task in tasks:
        agent.study(task=task, plan=PLAN)


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


def knows(engine: Engine, store: RemoteStore) -> None:
    """Wait until the engine was told of all that the service holds."""
    pool = engine.pool
    assert isinstance(pool, StoredPool)
    held = [entry.key for entry in store.entries(engine.namespace, pool.fingerprint)]
    until(lambda: all(key in pool._catalogue for key in held))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    with service_here(tmp_path) as found:
        yield found


def close(*engines: Engine) -> None:
    for engine in engines:
        engine.close()
        if engine.store is not None:
            engine.store.close()


def test_two_engines_end_with_the_sums_of_one_that_saw_all(served: tuple[Service, str]) -> None:
    """A reader gets the two nodes' own sums, added, to the bit; beside one engine only the order of adding differs."""
    a, b, one = node(served[1], "a"), node(served[1], "b"), engine_of()
    for n, task in enumerate(TASKS):
        study((a, b)[n % 2], task), study(one, task)
        for engine in (a, b):
            engine.flush()
            knows(engine, RemoteStore(served[1]))
    a.flush(), b.flush()
    own = Learned.empty(a.pool.fingerprint)
    for engine in (a, b):
        assert isinstance(engine._offsets, SavedSums)
        own.merge(engine._offsets._shared._own)
    assert node(served[1], "c", learn=False).book.statistics.digest() == own.statistics.digest()
    for engine in (a, b):
        assert set(engine.book.statistics.pairs) == set(one.book.statistics.pairs)
        for pair, sums in one.book.statistics.pairs.items():
            found = engine.book.statistics.pairs[pair]
            assert torch.equal(found.calls, sums.calls)
            assert torch.equal(found.tokens, sums.tokens)
            for name, tensor in sums.tensors().items():
                torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-4, atol=1e-4)
    close(a, b)


def closeness(engine: Engine, task: str) -> float:
    """Mean KL from dense over the plan's tokens, with the offsets that the engine knows and no token recomputed."""
    agent = engine.agents.get("writer") or engine.agent("writer", PARTS)
    prompt = agent.prompt(task=task, plan=PLAN)
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        dense = engine.model(ids).logits[0, -1:]
        prefilled = engine.prefill(prompt)
        assert prefilled.plan.counts.approximate, prefilled.plan
        found = engine.model.generate(
            **prefilled.generate_kwargs(), max_new_tokens=1, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return float(kl_divergence(dense, found.logits[0]).mean())


def test_a_fresh_engine_is_as_close_as_the_one_that_saw_the_calls(served: tuple[Service, str]) -> None:
    saw = node(served[1], "a")
    study(saw, *TASKS[:3])
    saw.flush()
    fresh, frozen = node(served[1], "b"), node(served[1], "c", learn=False)
    for engine in (fresh, frozen):
        assert engine.book.statistics.digest() == saw.book.statistics.digest()
        assert closeness(engine, TASKS[3]) == pytest.approx(closeness(saw, TASKS[3]), rel=1e-3)
    subject_nodes = served[0].core.learned.usage(saw.namespace)
    fresh.flush(), frozen.flush()
    assert served[0].core.learned.usage(saw.namespace) == subject_nodes  # what was fetched is never sent back
    close(saw, fresh, frozen)


def test_news_of_others_are_used_and_what_they_drop_is_gone(served: tuple[Service, str]) -> None:
    first, second = node(served[1], "a"), node(served[1], "b", policy=Exact())
    study(first, TASKS[0])
    first.flush()
    assert isinstance(second.pool, StoredPool)
    knows(second, RemoteStore(served[1]))
    agent = second.agent("writer", PARTS)
    reply = agent.generate(task=TASKS[0], plan=PLAN, max_new_tokens=2, options=GREEDY)
    assert reply.usage.cached_tokens > 0
    segment = agent.prompt(task=TASKS[0], plan=PLAN).parts[1].segment
    assert second.pool.bases(segment)
    first.forget(segment)
    until(lambda: not second.pool.bases(segment))
    close(first, second)


def test_what_the_service_evicted_costs_a_prompt_one_call(
    served: tuple[Service, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions are not told of: of all the bases that an engine believes held, one call says which are not."""
    first, second = node(served[1], "a"), node(served[1], "b")
    study(first, TASKS[0])
    first.flush()
    knows(second, RemoteStore(served[1]))
    prompt = second.agent("writer", PARTS).prompt(task=TASKS[0], plan=PLAN)
    store = served[0].core.store
    for entry in list(store.entries()):
        store.delete(entry.key)  # beside the service, as evictions are
    calls = counted_calls(monkeypatch)
    for _ in range(2):
        assert second.prefill(prompt).plan.counts.new == len(prompt)
        assert (calls["contains_many"], calls["open"]) == (1, 0)
    close(first, second)


def test_a_frozen_engine_finds_nothing_new_and_loses_what_is_dropped(served: tuple[Service, str]) -> None:
    first = node(served[1], "a")
    study(first, TASKS[0])
    first.flush()
    frozen, follower = node(served[1], "b", learn=False), node(served[1], "c")
    study(first, TASKS[1])
    first.flush()
    knows(follower, RemoteStore(served[1]))
    old, new = (first.agents["writer"].prompt(task=task, plan=PLAN).parts[1].segment for task in TASKS[:2])
    assert frozen.pool.bases(old)
    assert not frozen.pool.bases(new)
    first.forget(old)
    until(lambda: not frozen.pool.bases(old))
    close(first, frozen, follower)


def test_of_two_nodes_that_miss_one_text_one_computes_it(served: tuple[Service, str]) -> None:
    engines = [node(served[1], name, policy=Exact()) for name in "ab"]
    replies: list[Any] = [None, None]
    ready = threading.Barrier(2)

    def call(n: int) -> None:
        agent = engines[n].agent("writer", PARTS)
        ready.wait()
        replies[n] = agent.generate(task=TASKS[0] * 6, plan=PLAN, max_new_tokens=3, options=GREEDY)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies[0].token_ids == replies[1].token_ids
    cached = sorted(reply.usage.cached_tokens for reply in replies)
    assert cached[0] == 0
    assert cached[1] > 100
    assert served[0].core.claims.count() == 0
    close(*engines)


def test_a_claim_whose_holder_is_gone_costs_its_lease_at_most(served: tuple[Service, str]) -> None:
    gone, alone = node(served[1], "a", policy=Exact()), node(served[1], "b", policy=Exact())
    prompt = gone.agent("writer", PARTS).prompt(task=TASKS[0] * 6, plan=PLAN)
    from kvcomm.hf.claiming import Claimed

    assert Claimed(gone, prompt, Exact()).claim is not None  # and it never computes
    agent = alone.agent("writer", PARTS)
    started = time.monotonic()
    reply = agent.generate(task=TASKS[0] * 6, plan=PLAN, max_new_tokens=2, options=GREEDY)
    assert 1.0 < time.monotonic() - started < TERMS.claim_s + 4.0
    assert reply.token_ids == answer(alone, prompt, 2)
    close(gone, alone)


def test_a_silent_service_costs_a_call_one_deadline_and_later_ones_nothing(tmp_path: Path) -> None:
    """A prompt of five parts that the service holds, a claim and several puts: each would wait; together one does."""
    with proxied(tmp_path) as (_, proxy):
        first = node(proxy.address, "a", policy=Exact())
        agent = first.agent("writer", PARTS)
        agent.generate(task=TASKS[0] * 6, plan=PLAN, max_new_tokens=2, options=GREEDY)
        first.flush()
        second = node(proxy.address, "b", SILENT, policy=Exact())
        knows(second, second.store)
        pool, waits = second.pool, Waits(second)
        assert isinstance(pool, StoredPool)
        proxy.black_hole = True
        agent = second.agent("writer", PARTS)
        reply = agent.generate(task=TASKS[0] * 6, plan=PLAN, max_new_tokens=2, options=GREEDY)
        assert reply.usage.cached_tokens == 0
        assert pool.faults >= 1
        assert 0.0 < waits.take() <= SILENT.silence_s + 0.1
        again = agent.generate(task=TASKS[1] * 6, plan=PLAN, max_new_tokens=2, options=GREEDY)
        assert waits.take() < 0.1
        assert again.token_ids == answer(second, agent.prompt(task=TASKS[1] * 6, plan=PLAN), 2)
        proxy.black_hole = False
        until(lambda: pool.guard.open, 20.0)
        reply = agent.generate(task=TASKS[0] * 6, plan=PLAN, max_new_tokens=2, options=GREEDY)
        assert reply.token_ids == answer(second, agent.prompt(task=TASKS[0] * 6, plan=PLAN), 2)
        close(first, second)


class Waits:
    """Seconds that the calling thread spent in calls to the store and to where nodes meet."""

    def __init__(self, engine: Engine) -> None:
        self._seconds, self._thread = 0.0, threading.get_ident()
        store: Any = engine.store
        for owner, names in (
            (store, ("get", "put", "contains", "contains_many")),
            (store.coordinator, ("claim", "unclaim", "nearest")),
        ):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.monotonic()
            try:
                return call(*args, **options)
            finally:
                if threading.get_ident() == self._thread:
                    self._seconds += time.monotonic() - started

        return timed

    def take(self) -> float:
        """Since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def test_no_service_costs_an_engine_nothing_but_reuse(tmp_path: Path) -> None:
    store = RemoteStore(f"unix:{tmp_path}/nobody.sock", terms=TERMS)
    engine = engine_of(store=store, policy=Exact())
    agent = engine.agent("writer", PARTS)
    reply = agent.generate(task=TASKS[0], plan=PLAN, max_new_tokens=3, options=GREEDY)
    assert reply.token_ids == answer(engine, agent.prompt(task=TASKS[0], plan=PLAN), 3)
    store.close()


def test_a_tenant_sees_what_it_would_see_alone(tmp_path: Path) -> None:
    def world(folder: Path, with_other: bool) -> tuple[Any, ...]:
        folder.mkdir()
        with service_here(folder) as (_, address):
            mine = node(address, "a", namespace="mine")
            other = node(address, "a", namespace="other") if with_other else None
            seen: list[Any] = []
            for task in TASKS:
                if other is not None:
                    study(other, task, task.replace("list", "heap"))
                    other.flush()
                study(mine, task)
                mine.flush()
                prompt = mine.agents["writer"].prompt(task=task, plan=PLAN)
                plan = mine.prefill(prompt).plan
                seen += [[(p.action, p.start, p.recompute, p.pair) for p in plan.parts], mine.book.statistics.digest()]
                near = mine.pool.neighbours(prompt.parts[1].segment, 8, 0.1)
                seen.append([(n.segment.digest, n.cosine) for n in near])
            bases = mine.pool.bases(prompt.parts[3].segment)
            offset = mine.book.estimate(plan.parts[3].pair, bases[0].kv) if plan.parts[3].pair else None
            seen.append(None if offset is None else offset.keys.numpy().tobytes())
            if other is not None:
                close(other)
            close(mine)
            return tuple(seen)

    assert world(tmp_path / "shared", True) == world(tmp_path / "alone", False)
