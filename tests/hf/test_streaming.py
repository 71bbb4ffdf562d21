"""An answer in pieces: the same answer; who stops reading stops it; an error reaches the reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

import pytest
from transformers import StoppingCriteria

from kvcomm import InvalidInput, Reply
from kvcomm.hf.streaming import stream_chat
from tests.hf.engines import GREEDY, engine_of, state

TALK = [{"role": "user", "content": "What is the day?"}]


def read(pieces: Generator[str, None, Reply]) -> tuple[list[str], Reply]:
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as ended:
            return found, ended.value


def test_pieces_are_the_answer() -> None:
    expected = engine_of().chat(TALK, max_new_tokens=12, **GREEDY)
    found, reply = read(stream_chat(engine_of(), TALK, max_new_tokens=12, **GREEDY))
    assert "".join(found) == reply.text == expected.text and reply.token_ids == expected.token_ids


def test_who_stops_reading_stops_the_generation() -> None:
    engine = engine_of()
    before, threads = state(engine), threading.active_count()
    pieces = stream_chat(engine, TALK, max_new_tokens=400, suppress_tokens=[0, 1, 2, 3, 4, 5], **GREEDY)
    next(pieces)
    pieces.close()
    assert state(engine) == before, "something of the call was kept"
    assert threading.active_count() == threads


class Fails(StoppingCriteria):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"tools": [{"name": "f"}]}, InvalidInput, "does not show tools"),
        ({"max_new_tokens": 0}, InvalidInput, "ask for at least 1"),
        ({"stopping_criteria": [Fails()]}, RuntimeError, "no more"),
        ({"streamer": object()}, InvalidInput, "both read the answer"),
    ],
)
def test_an_error_reaches_the_reader(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    engine = engine_of()
    before = state(engine)
    with pytest.raises(error, match=said):
        list(stream_chat(engine, TALK, **wrong))
    assert state(engine) == before


def test_a_conversation_from_asyncio_is_the_same_and_can_be_cancelled() -> None:
    expected = engine_of().chat(TALK, max_new_tokens=12, **GREEDY)
    engine = engine_of()

    async def cancelled() -> None:
        work = asyncio.ensure_future(engine.achat(TALK, max_new_tokens=400, **GREEDY))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    before = state(engine)
    asyncio.run(cancelled())
    assert state(engine) == before
    assert asyncio.run(engine.achat(TALK, max_new_tokens=12, **GREEDY)).token_ids == expected.token_ids
