"""Conversations beside what else an engine does: files, forgetting, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcomm import Engine, Exact, InvalidInput
from kvcomm.hf.forget import Conversation
from kvcomm.store import MemoryStore
from tests.hf.engines import bases, engine_of, plain
from tests.hf.test_chat import PLAINLY


def talk(engine: Engine, turns: int, name: str = "chat", about: str = "the sea") -> tuple[list[Any], list[Any]]:
    """Messages of a conversation that waits for an answer, and the replies before."""
    messages: list[Any] = [{"role": "system", "content": f"You answer questions about {about}."}]
    replies = []
    for n in range(turns):
        messages.append({"role": "user", "content": f"Question {n}: how deep is it there, and why?"})
        replies.append(engine.chat(messages, name=name, **PLAINLY))
        messages.append({"role": "assistant", "content": replies[-1].text})
    messages.append({"role": "user", "content": "And then?"})
    return messages, replies


def held(reply: Any) -> int:
    """Tokens that the next turn begins with."""
    return len(reply.plan.prompt) + len(reply.segment)


def is_the_models_own(engine: Engine, reply: Any) -> bool:
    whole = plain(engine, reply.plan.prompt, **PLAINLY)
    return reply.token_ids == tuple(whole[0, len(reply.plan.prompt) :].tolist())


def test_a_conversation_goes_on_from_a_file(tmp_path: Path) -> None:
    engine = engine_of(policy=Exact())
    messages, replies = talk(engine, 3)
    engine.save(tmp_path / "pool")
    other = Engine(engine.model, engine.tokenizer, policy=Exact())
    assert other.load(tmp_path / "pool") == len(engine.pool)
    reply = other.chat(messages, **PLAINLY)
    assert reply.usage.exact == held(replies[-1]) and is_the_models_own(other, reply)


def test_a_conversation_goes_on_from_a_store() -> None:
    with MemoryStore(max_bytes=64 << 20) as store:
        with engine_of(policy=Exact(), store=store) as engine:
            messages, replies = talk(engine, 3)
        with Engine(engine.model, engine.tokenizer, policy=Exact(), store=store) as other:
            reply = other.chat(messages, **PLAINLY)
    assert reply.usage.exact == held(replies[-1]) and is_the_models_own(engine, reply)


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_is_forgotten_by_its_name_and_others_stay(stored: bool) -> None:
    with MemoryStore(max_bytes=64 << 20) as store:
        engine = engine_of(policy=Exact(), **({"store": store} if stored else {}))
        messages, _ = talk(engine, 2, "one")
        others, replies = talk(engine, 2, "two", "the moon")
        found = engine.forget(Conversation("one"))
        assert found.bases > 0 and not [b for b in engine.pool if b.recipe.context.startswith("one/")]
        assert engine.forget(Conversation("one")).bases == 0
        # What both begin with was captured in the one that is forgotten: the other computes it once more.
        assert is_the_models_own(engine, engine.chat(others, name="two", **PLAINLY))
        assert engine.chat(others, name="two", **PLAINLY).usage.exact >= held(replies[-1])
        engine.forget(Conversation("one"))
        again = engine.chat(messages, name="one", **PLAINLY)
        assert is_the_models_own(engine, again)
        assert not any(part.action == "exact" for part in again.plan.parts if part.part.label == "one/user")
    with pytest.raises(InvalidInput, match="without '/'"):
        Conversation("a/b")


def test_a_forgotten_message_is_computed_again_and_no_answer_changes() -> None:
    engine = engine_of(policy=Exact())
    messages, replies = talk(engine, 3)
    part = [part.part for part in replies[-1].plan.parts if part.part.label == "chat/user"][1]
    assert engine.forget(part.segment).bases > 0 and not bases(engine, part.segment)
    reply = engine.chat(messages, **PLAINLY)
    assert reply.usage.exact < held(replies[-1]) and is_the_models_own(engine, reply)
    assert bases(engine, part.segment)


def test_conversations_in_threads_cost_their_new_turns_and_get_the_models_own_answers() -> None:
    engine = engine_of(policy=Exact())
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda n: talk(engine, 3, f"agent {n}", f"sea number {n}")[1], range(6)))
    for replies in found:
        for before, after in zip(replies, replies[1:], strict=False):
            assert after.usage.exact == held(before)
        assert all(is_the_models_own(engine, reply) for reply in replies)
