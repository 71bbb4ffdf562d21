"""Verified() and Healed() in use: events, cancellation, learning, conversations, threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from kvcomm import Dense, Engine, Healed, Verified
from kvcomm.closeness import kl_divergence
from kvcomm.hf.events import DraftStreamer, Event, EventStreamer, shown
from kvcomm.hf.stopping import Cancellation, Cancelled
from kvcomm.hf.streaming import chat_events
from kvcomm.reuse.prompt import Prompt
from kvcomm.types import Segment
from tests.hf.engines import GREEDY, TOLERANCE, answer, engine_of, kv_error, state
from tests.hf.reused import FREE, plain_answer, spoil, taught
from tests.hf.test_threads import in_threads

NEW = 20
POLICY = Verified(FREE, 8)


def applied(events: list[Event]) -> list[int]:
    """The final tokens after all events, which must go together."""
    final: list[int] = []
    drafts: list[int] = []
    for event in events:
        for token in event.tokens if event.kind != "back" else ():
            if event.kind == "draft":
                drafts.append(token)
            else:
                assert not drafts or drafts[0] == token
                drafts[:1] = []
                final.append(token)
        if event.kind == "back":
            assert tuple(drafts[-len(event.tokens) :]) == event.tokens and event.tokens
            del drafts[-len(event.tokens) :]
    assert not drafts
    return final


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spoiled", [False, True])
def test_events_make_the_answer(family: str, spoiled: bool) -> None:
    engine, prompts = taught(family)
    if spoiled:
        spoil(engine, prompts)
    backs = 0
    for n, prompt in enumerate(prompts):
        streamer = EventStreamer(engine.tokenizer, timeout=20)
        options = {"eos_token_id": plain_answer(engine, prompt, max_new_tokens=3, **GREEDY)[2]} if n % 3 == 0 else {}
        reply = engine.generate(prompt, policy=POLICY, max_new_tokens=NEW, streamer=streamer, **GREEDY, **options)
        events = list(streamer)
        assert applied(events) == list(reply.token_ids) and shown(events) == reply.text
        made = reply.exactness
        assert made is not None and made.drafts == sum(event.kind == "draft" for event in events)
        assert made.taken_back == sum(len(event.tokens) for event in events if event.kind == "back")
        assert events[0].kind == "draft"
        backs += made.taken_back
    assert backs or not spoiled
    streamer = EventStreamer(engine.tokenizer, timeout=20)
    reply = engine.generate(prompts[0], max_new_tokens=5, streamer=streamer, **GREEDY)
    assert [event.kind for event in streamer] == ["final"] * 5 and reply.exactness is None


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    class Bytes:
        """A tokenizer whose ids are bytes."""

        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    streamer = EventStreamer(Bytes())  # type: ignore[arg-type]
    euro = "a€".encode()
    streamer.put(torch.tensor([[1, 2]]))
    for byte in euro[:3]:
        streamer.draft(byte)
    streamer.back(1)
    for byte in euro[2:]:
        streamer.draft(byte)
    for byte in euro:
        streamer.put(torch.tensor([byte]))
    streamer.put(torch.tensor([euro[1]]))
    streamer.end()
    events = list(streamer)
    assert applied(events[:-1]) == [*euro, euro[1]] and shown(events) == "a€\ufffd"
    assert [event.text for event in events if event.text] == ["a", "€", "\ufffd"]


class Stage(DraftStreamer):
    """Cancels, or fails, at the n-th of one kind of step."""

    def __init__(self, stop: Cancellation, kind: str, n: int, fails: bool) -> None:
        self.stop, self.kind, self.left, self.fails, self.ends = stop, kind, n, fails, 0

    def _seen(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left == 0 and self.fails:
                raise RuntimeError("the socket is closed")
            if self.left == 0:
                self.stop.cancel()

    def put(self, value: torch.Tensor) -> None:
        self._seen("prompt" if value.dim() == 2 else "final")

    def draft(self, token: int) -> None:
        self._seen("draft")

    def back(self, count: int) -> None:
        self._seen("back")

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("kind", "n"), [("prompt", 1), ("draft", 1), ("draft", 3), ("back", 1), ("final", 1), ("final", 9)]
)
def test_whoever_gives_up_at_any_stage_leaves_nothing(kind: str, n: int, fails: bool) -> None:
    engine, prompts = taught(learn=True)
    spoil(engine, prompts)
    before, stop = state(engine), Cancellation()
    streamer = Stage(stop, kind, n, fails)
    with pytest.raises(RuntimeError if fails else Cancelled):
        engine.generate(
            prompts[0],
            label="critic/reply",
            policy=POLICY,
            max_new_tokens=NEW,
            streamer=streamer,
            stopping_criteria=[stop],
            **GREEDY,
        )
    assert state(engine) == before and streamer.ends >= 1
    reply = engine.generate(prompts[0], policy=POLICY, max_new_tokens=NEW, **GREEDY)
    assert list(reply.token_ids) == plain_answer(engine, prompts[0], max_new_tokens=NEW, **GREEDY)


def test_giving_up_between_two_pieces_ends_the_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = taught()
    stop, passes, forward = Cancellation(), [], engine.backend.forward

    def watched(*arguments: Any, **named: Any) -> torch.Tensor:
        passes.append(len(arguments[1]))
        if passes.count(4) == 2:
            stop.cancel()
        return forward(*arguments, **named)

    monkeypatch.setattr(engine.backend, "forward", watched)
    with pytest.raises(Cancelled):
        engine.generate(prompts[0], policy=Verified(FREE, 4), max_new_tokens=NEW, stopping_criteria=[stop], **GREEDY)
    assert passes[-1] == 4 and passes.count(4) == 2


def taught_by(policy: Any) -> tuple[Engine, Segment, Prompt, Any]:
    """What an engine holds after one call under ``policy`` whose prompt has known and new text."""
    engine, prompts = taught(learn=True)
    prompt = prompts[-1]
    reply = engine.generate(prompt, label="critic/reply", policy=policy, max_new_tokens=NEW, **GREEDY)
    return engine, reply.segment, prompt, reply


@pytest.mark.parametrize("policy", [POLICY, Healed(FREE, 8)])
def test_a_healed_call_teaches_what_a_dense_one_does(policy: Any) -> None:
    dense, _, prompt, _ = taught_by(Dense())
    engine, answered, _, reply = taught_by(policy)
    assert reply.usage.approximate > 0 and reply.exactness.exact_s is not None
    assert reply.exactness.healed_tokens >= len(prompt) - reply.plan.exact_until
    labels = {part.label for part in prompt.parts}
    assert any(engine.book.calls(label) for label in labels)
    for label in labels:
        assert engine.book.calls(label) == dense.book.calls(label)
    new = [part.segment for part in prompt.parts]
    held = {(b.segment.digest, b.recipe): b.kv for s in new for b in dense.pool.bases(s)}
    mine = {(b.segment.digest, b.recipe): b.kv for s in new for b in engine.pool.bases(s)}
    assert held.keys() == mine.keys() and any(recipe.exact for _, recipe in mine)
    assert all(kv_error(mine[key], held[key]) < TOLERANCE for key in mine)
    (base,) = engine.pool.bases(answered)
    assert base.recipe.exact
    again = engine_of(policy=Dense())
    again.generate(Prompt((*prompt.parts,)), max_new_tokens=1, **GREEDY)
    again.force(prompt, answered, label="critic/reply")
    (own,) = again.pool.bases(answered)
    assert kv_error(base.kv, own.kv) < TOLERANCE


def test_healing_that_an_answer_ends_teaches_what_was_healed() -> None:
    engine, answered, prompt, reply = taught_by(Healed(FREE, 1))
    assert reply.exactness.exact_s is None and reply.exactness.healed_tokens == NEW
    assert not any(base.recipe.exact for base in engine.pool.bases(answered))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_healing_comes_nearer_to_the_dense_answer_and_ends_there(family: str) -> None:
    engine, prompts = taught(family)
    spoil(engine, prompts, 0.5)
    closer = 0
    for prompt in prompts[:6]:
        forced = Segment(answer(engine, prompt, NEW))
        dense, _ = engine.force(prompt, forced, policy=Dense())
        kl = {}
        for policy in (FREE, Healed(FREE, 8)):
            logits, plan = engine.force(prompt, forced, policy=policy)
            assert plan.counts.approximate > 0 and logits.shape == dense.shape
            kl[policy] = kl_divergence(dense, logits)
        healed = kl[Healed(FREE, 8)]
        assert torch.allclose(healed[0], kl[FREE][0]), "the first token comes before any healing"
        assert healed[-5:].max() < 1e-6
        closer += float(healed.mean()) < float(kl[FREE].mean())
    assert closer == 6


def test_forced_healing_is_the_healing_of_generation() -> None:
    engine, prompts = taught()
    spoil(engine, prompts, 0.5)
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    for piece in (3, 8, 1000):
        policy = Healed(FREE, piece)
        reply = engine.generate(prompts[0], policy=policy, max_new_tokens=NEW, **GREEDY, **outputs)
        logits, _ = engine.force(prompts[0], Segment(reply.token_ids), policy=policy)
        torch.testing.assert_close(torch.cat(reply.output.logits), logits, atol=2e-4, rtol=1e-4)


TALK = [{"role": "user", "content": "What is the day?"}]


def test_a_conversation_is_verified_and_its_next_turn_exact() -> None:
    engine = engine_of(policy=Verified(FREE, 8))
    engine.chat([{"role": "user", "content": "On what day is it then? " * 3}], max_new_tokens=4, **GREEDY)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "On what day is it then? " * 3}]
    first = engine.chat(talk, max_new_tokens=NEW, **GREEDY)
    assert first.usage.approximate > 0 and first.exactness is not None and first.exactness.drafts > 0
    assert list(first.token_ids) == plain_answer(engine, first.plan.prompt, max_new_tokens=NEW, **GREEDY)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Sure?"}]
    second = engine.chat(talk, max_new_tokens=NEW, **GREEDY)
    assert second.usage.exact >= len(first.plan.prompt)
    assert list(second.token_ids) == plain_answer(engine, second.plan.prompt, max_new_tokens=NEW, **GREEDY)


def test_a_conversation_as_events_and_from_asyncio() -> None:
    engine = engine_of(policy=Verified(FREE, 8))
    known = "On what day is it then? " * 3
    engine.chat([{"role": "user", "content": known}], max_new_tokens=4, **GREEDY)
    engine = engine.fork(policy=engine.policy, learn=False)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": known}]
    expected = engine.chat(talk, max_new_tokens=NEW, **GREEDY)
    events, pieces = [], chat_events(engine, talk, max_new_tokens=NEW, **GREEDY)
    while True:
        try:
            events.append(next(pieces))
        except StopIteration as ended:
            reply = ended.value
            break
    assert reply.token_ids == expected.token_ids and {event.kind for event in events} >= {"draft", "final"}
    assert applied(events) == list(reply.token_ids) and shown(events) == reply.text
    assert asyncio.run(engine.achat(talk, max_new_tokens=NEW, **GREEDY)).token_ids == expected.token_ids
    left = chat_events(engine, talk, max_new_tokens=400, suppress_tokens=[0, 1, 2, 3, 4, 5], **GREEDY)
    assert next(left).kind == "draft"
    left.close()


class Waits(StoppingCriteria):
    """Slows an answer down."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        import time

        time.sleep(0.01)
        return torch.zeros(1, dtype=torch.bool)  # type: ignore[return-value]


@pytest.mark.parametrize("policy", [POLICY, Healed(FREE, 8)])
def test_cancelling_a_task_stops_it_and_keeps_nothing(policy: Any) -> None:
    engine, prompts = taught(learn=True)
    before = state(engine)

    async def give_up() -> None:
        work = asyncio.create_task(
            engine.agenerate(prompts[0], policy=policy, max_new_tokens=2000, stopping_criteria=[Waits()], **GREEDY)
        )
        await asyncio.sleep(0.3)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(give_up())
    assert state(engine) == before


def test_threads_get_the_answers_of_one_by_one() -> None:
    engine, prompts = taught()
    spoil(engine, prompts, 2.0)
    expected = [plain_answer(engine, prompt, max_new_tokens=6, **GREEDY) for prompt in prompts[:4]]

    def work(t: int) -> list[list[int]]:
        return [
            list(engine.generate(prompts[(t + n) % 4], policy=POLICY, max_new_tokens=6, **GREEDY).token_ids)
            for n in range(3)
        ]

    assert in_threads(work) == [[expected[(t + n) % 4] for n in range(3)] for t in range(16)]


def test_a_token_is_handed_out_before_the_healing_beside_it() -> None:
    engine, prompts = taught()
    order: list[str] = []

    class Notes(DraftStreamer):
        def put(self, value: torch.Tensor) -> None:
            order.append("token")

        def draft(self, token: int) -> None:
            order.append("token")

        def end(self) -> None:
            order.append("end")

    forward = engine.backend.forward

    def watched(*arguments: Any, **named: Any) -> torch.Tensor:
        if len(arguments[1]) == 8:
            order.append("piece")
        return forward(*arguments, **named)

    engine.backend.forward = watched  # type: ignore[method-assign]
    for policy in (POLICY, Healed(FREE, 8)):
        order.clear()
        engine.generate(prompts[0], policy=policy, max_new_tokens=NEW, streamer=Notes(), **GREEDY)
        prompt_seen = ["token"]
        assert order[:5] == [*prompt_seen, "token", "piece", "token", "piece"] and order[-1] == "end"


def call_of(engine: Engine, prompt: Prompt, policy: Any) -> Callable[[], Any]:
    return lambda: engine.generate(prompt, policy=policy, max_new_tokens=NEW, **GREEDY)


def test_no_more_memory_than_without() -> None:
    """The request's one buffer: pieces are computed in place."""
    engine, prompts = taught()
    taken: list[int] = []
    buffer = engine.backend.buffer
    engine.backend.buffer = lambda capacity: taken.append(capacity) or buffer(capacity)  # type: ignore[method-assign, func-returns-value]
    for policy in (FREE, POLICY, Healed(FREE, 8)):
        call_of(engine, prompts[0], policy)()
    assert taken == [len(prompts[0]) + NEW] * 3
