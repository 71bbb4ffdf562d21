"""An answer in pieces of text as they are generated, for those who iterate over it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from transformers import TextIteratorStreamer

from kvcomm.errors import InvalidInput
from kvcomm.hf.chat import Tool
from kvcomm.hf.chat_text import Message
from kvcomm.hf.events import Event, EventStreamer
from kvcomm.hf.reply import Reply
from kvcomm.hf.stopping import Cancellation, criteria_of

if TYPE_CHECKING:
    from kvcomm.hf.engine import Engine


def stream_chat(
    engine: Engine, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **options: Any
) -> Generator[str, None, Reply]:
    """As Engine.chat, from a thread of its own: yields the text in pieces and returns the reply.

    Who closes the generator before its end stops the generation at its next token; nothing of the call is kept then.
    Under ``Verified()`` the pieces are final text; ``chat_events`` yields drafts too.

    Args:
        options: of Engine.chat; ``streamer`` is taken.

    Raises:
        InvalidInput: with the first piece, as Engine.chat.
    """
    streamer: Any = TextIteratorStreamer(engine.tokenizer, skip_prompt=True, skip_special_tokens=True)
    pieces: Generator[str, None, Reply] = _streamed(engine, messages, tools, streamer, options)
    return pieces


def chat_events(
    engine: Engine, messages: Sequence[Message], tools: Sequence[Tool] | None = None, **options: Any
) -> Generator[Event, None, Reply]:
    """As stream_chat, but yields what happens to the answer: drafts, final tokens, drafts taken back."""
    pieces: Generator[Event, None, Reply] = _streamed(engine, messages, tools, EventStreamer(engine.tokenizer), options)
    return pieces


def _streamed(
    engine: Engine, messages: Sequence[Message], tools: Sequence[Tool] | None, streamer: Any, options: dict[str, Any]
) -> Generator[Any, None, Reply]:
    """What ``streamer`` yields of a chat in another thread, but empty pieces; returns the reply."""
    if options.get("streamer") is not None:
        raise InvalidInput("streamer=... and pieces both read the answer; pass the streamer to engine.chat instead")
    options.pop("streamer", None)
    stop = Cancellation()
    criteria = (*criteria_of(options), stop)

    def call() -> Reply:
        try:
            return engine.chat(messages, tools, streamer=streamer, stopping_criteria=criteria, **options)
        except BaseException:
            streamer.end()  # whoever reads must not wait for ever
            raise

    with ThreadPoolExecutor(1, "kvcomm-stream") as threads:
        work = threads.submit(call)
        try:
            for piece in streamer:
                if piece:
                    yield piece
        except BaseException:
            stop.cancel()
            raise
        return work.result()
