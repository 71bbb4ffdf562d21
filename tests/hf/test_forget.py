"""Forgetting a text, an agent, a namespace: gone from memory and from the store, and the rest is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcomm import Balanced, Engine, InvalidInput
from kvcomm.anchors.saved import load_from
from kvcomm.anchors.softmax import SoftmaxBook
from kvcomm.errors import CorruptEntry, FingerprintMismatch
from kvcomm.store import DiskStore, MemoryStore, Store, TieredStore
from kvcomm.types import Namespace
from tests.hf.engines import GREEDY, bases, engine_of, state, two_agents

POLICY = Balanced(gate=False, learn_first=0)
SECRET, OTHER = "The word is swordfish, and nobody knows it.", "Count the waves that come in."


def used(engine: Engine) -> None:
    """Both agents got both texts, and the writer answered."""
    writer, critic = two_agents(engine)
    for task in (SECRET, OTHER):
        draft = writer.generate(task=task, max_new_tokens=6, options=GREEDY)
        critic.generate(task=task, draft=draft, max_new_tokens=4, options=GREEDY)
        critic.study(task=task, draft=draft)


def store_of(kind: str, folder: Path) -> Store:
    """One of three kinds of store."""
    if kind == "memory":
        return MemoryStore(max_bytes=64 << 20)
    disk = DiskStore(folder)
    return disk if kind == "disk" else TieredStore([MemoryStore(max_bytes=64 << 20), disk])


KINDS = ["memory", "disk", "tiers"]


def test_a_text_is_gone_and_the_others_stay() -> None:
    engine = engine_of(policy=POLICY)
    used(engine)
    text, other = (engine.agents["writer"].template.text_segment(t) for t in (SECRET, OTHER))
    held, rest = len(engine.pool), bases(engine, other)
    version = engine.version
    assert engine.forget(text).bases == len(engine.pool.bases(text)) + held - len(engine.pool) > 0
    assert not bases(engine, text) and bases(engine, other) == rest and engine.version != version
    assert engine.forget(text).bases == 0
    reply = engine.agents["critic"].generate(task=SECRET, draft="d", max_new_tokens=1, options=GREEDY)
    assert [part.action for part in reply.plan.parts if part.part.segment == text] == ["new"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_gone_from_the_store_whoever_put_it_there(tmp_path: Path, kind: str) -> None:
    with store_of(kind, tmp_path) as store:
        first = engine_of(policy=POLICY, store=store)
        later = Engine(first.model, first.tokenizer, policy=POLICY, store=store)  # lists the store before it is filled
        used(first)
        text = first.agents["writer"].template.text_segment(SECRET)
        found = later.forget(text)
        assert found.bases == len(first.pool.bases(text)) > 0
        assert text.digest not in {entry.key.content for entry in store.entries()} and list(store.entries())
        third = Engine(first.model, first.tokenizer, policy=POLICY, store=store)
        assert not third.pool.bases(text)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agents_places_are_gone_from_pool_offsets_and_store(tmp_path: Path, kind: str) -> None:
    with store_of(kind, tmp_path) as store:
        engine = engine_of(policy=POLICY, store=store)
        used(engine)
        engine.flush()
        assert any("critic/" in pair.used for pair in engine.book.statistics.pairs)
        found = engine.forget(engine.agents["critic"])
        assert found.bases > 0 and found.pairs > 0
        saved = load_from(store, engine.namespace, engine.pool.fingerprint)
        for learned in (engine.book.statistics.pairs, engine.book.gains, saved.statistics.pairs, saved.gains):
            assert not [p for p in learned if p.used.startswith("critic/") or p.captured.startswith("critic/")]
        contexts = {entry.key.recipe.context for entry in store.entries()}
        contexts |= {base.recipe.context for base in engine.pool}
        assert contexts and not [c for c in contexts if c.startswith("critic/")]
        draft = engine.agents["critic"].generate(task=OTHER, draft="d", max_new_tokens=3, options=GREEDY)
        assert len(draft.token_ids) == 3  # the agent itself goes on
        engine.flush()  # what was learned and not yet saved does not come back
        saved = load_from(store, engine.namespace, engine.pool.fingerprint)
        assert not [p for p in saved.statistics.pairs if p.captured == "critic/reply"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_namespace_is_as_new(tmp_path: Path, kind: str) -> None:
    with store_of(kind, tmp_path) as store:
        fresh = engine_of(policy=POLICY, namespace="ours")
        engine = Engine(fresh.model, fresh.tokenizer, policy=POLICY, namespace="ours", store=store)
        neighbour = Engine(fresh.model, fresh.tokenizer, policy=POLICY, namespace="theirs", store=store)
        for one in (engine, neighbour):
            used(one)
            one.flush()
        theirs = state(neighbour)
        assert engine.forget(Namespace("ours")).bases > 0
        assert not list(store.entries(Namespace("ours"))) and list(store.entries(Namespace("theirs")))
        assert state(neighbour) == theirs
        engine.flush()
        assert not load_from(store, engine.namespace, engine.pool.fingerprint).statistics.pairs
        two_agents(fresh)
        assert state(engine)[1:] == state(fresh)[1:]  # all but the version: sums are zero, no base, no test
        assert engine.agents["writer"].generate(task=SECRET, max_new_tokens=1, options=GREEDY).usage.cached_tokens == 0


def test_anchors_of_a_softmax_book_go_too() -> None:
    engine = engine_of(policy=POLICY)
    book = engine.book = SoftmaxBook(engine.pool.fingerprint)
    used(engine)
    assert book.anchors
    engine.forget(engine.agents["critic"])
    assert not [pair for pair in book.anchors if pair.used.startswith("critic/")]
    engine.forget(engine.namespace)
    assert not book.anchors and not book.nbytes


def test_what_cannot_be_forgotten_is_said() -> None:
    engine = engine_of(policy=POLICY)
    used(engine)
    before = state(engine)
    with pytest.raises(InvalidInput, match="namespace default, not other"):
        engine.forget(Namespace("other"))
    with pytest.raises(InvalidInput, match="str cannot be forgotten"):
        engine.forget("writer")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a fork cannot forget"):
        engine.fork().forget(engine.namespace)
    assert state(engine) == before


def test_a_reply_keeps_no_kv() -> None:
    """What is forgotten is not kept alive by the replies that used it."""
    engine = engine_of(policy=POLICY)
    used(engine)
    reply = engine.agents["critic"].generate(task=SECRET, draft="d", max_new_tokens=1, options=GREEDY)
    assert reply.usage.cached_tokens > 0 and all(part.base is None for part in reply.plan.parts)


def test_save_and_load_without_a_store(tmp_path: Path) -> None:
    engine = engine_of(policy=POLICY)
    used(engine)
    assert engine.save(tmp_path / "pool") == len(engine.pool)
    other = Engine(engine.model, engine.tokenizer, policy=POLICY)
    assert other.load(tmp_path / "pool") == len(engine.pool)
    assert state(other)[1:5] == state(engine)[1:5]
    frozen = [
        Engine(one.model, one.tokenizer, policy=POLICY, pool=one.pool, book=one.book, learn=False)
        for one in (engine, other)
    ]
    replies = [
        two_agents(one)[1].generate(task=SECRET, draft=OTHER, max_new_tokens=8, options=GREEDY) for one in frozen
    ]
    assert replies[0].token_ids == replies[1].token_ids and replies[0].usage == replies[1].usage
    assert replies[0].usage.approximate > 0
    with pytest.raises(InvalidInput, match="learned here already"):
        engine.load(tmp_path / "pool")
    with pytest.raises(FingerprintMismatch, match="another model"):
        engine_of("mistral").load(tmp_path / "pool")
    with pytest.raises(InvalidInput, match="namespace 'default'"):
        Engine(engine.model, engine.tokenizer, namespace="other").load(tmp_path / "pool")
    (tmp_path / "pool").write_bytes((tmp_path / "pool").read_bytes()[:-1])
    with pytest.raises(CorruptEntry):
        Engine(engine.model, engine.tokenizer).load(tmp_path / "pool")
