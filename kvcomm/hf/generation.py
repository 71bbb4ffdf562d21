"""One call: prefill with reuse, the model's own generate, and afterwards what is kept and learned from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvcomm.checks import need
from kvcomm.errors import InvalidInput
from kvcomm.hf.arguments import DEFAULT_NEW_TOKENS, Settings, settle, stop_tokens
from kvcomm.hf.batch import Rows
from kvcomm.hf.claiming import Claimed
from kvcomm.hf.exactness import HealedOne, VerifiedOne, check_exactness, exactly
from kvcomm.hf.rehearsal import rehearse
from kvcomm.hf.reply import Exactness, Prefilled, Reply, Usage
from kvcomm.hf.stopping import Cancellation, Clock
from kvcomm.hf.support import cache_argument
from kvcomm.hf.template import check_label
from kvcomm.hf.turns import turn
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.healing import Healed, Verified, planning
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Exact, Policy
from kvcomm.reuse.prompt import Prompt
from kvcomm.types import Segment

if TYPE_CHECKING:
    from kvcomm.hf.core import Core

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What was asked of an engine; see Engine.generate."""

    prompts: Sequence[Prompt]
    labels: Sequence[str]
    max_new_tokens: int | None
    policy: Policy | None
    stopping_criteria: Sequence[StoppingCriteria]
    started: float | None
    options: Mapping[str, Any]


def generate(engine: Core, call: Call) -> list[Reply]:
    """A reply for each prompt of the call; see Engine.generate and Engine.generate_batch."""
    _check(call)
    began = time.perf_counter() if call.started is None else call.started
    Cancellation.check(call.stopping_criteria)
    policy = call.policy if call.policy is not None else engine.policy
    settings = settle(engine.model, engine.tokenizer, call.options, planning(policy), len(call.prompts))
    check_exactness(policy, settings, len(call.prompts))
    one = len(call.prompts) == 1 and (settings.copies == 1 or settings.whole)
    with ExitStack() as stack:
        stack.enter_context(_ended_on_failure(settings.arguments.get("streamer")))
        new_tokens = _new_tokens(engine, call, settings)
        with turn(engine.model, engine.backend.spec):
            rehearse(engine.model, settings.arguments, call.stopping_criteria, call.prompts[0].token_ids, new_tokens)
        claimed = Claimed(engine, call.prompts[0] if one else None, planning(policy))  # waits without the model
        stack.enter_context(closing(claimed))
        stack.enter_context(turn(engine.model, engine.backend.spec))
        ready = (
            _single(engine, call, settings, new_tokens, claimed) if one else _rows(engine, call, settings, new_tokens)
        )
        prepared = time.perf_counter()
        clock = Clock()
        stopping = StoppingCriteriaList([*call.stopping_criteria, clock, *ready.criteria])
        Cancellation.check(call.stopping_criteria)
        model_generate: Any = engine.model.generate
        handed = {**settings.arguments, **ready.generate_kwargs(), "max_new_tokens": new_tokens}
        with torch.inference_mode():
            output = model_generate(**handed, stopping_criteria=stopping)
        Cancellation.check(call.stopping_criteria)
        finished = time.perf_counter()
        first = ready.first or clock.first or finished
        if one:
            engine._took(ready.plans[0], first - prepared)
        answers = _answers(output, settings, max(map(len, call.prompts)), len(call.prompts))
        stops = stop_tokens(engine.model, engine.tokenizer, call.options)
        segments = [Segment(_until(rows[0], stops)) for rows in answers]
        learned = [time.perf_counter()]
        buffers = ready.take_back([len(segment) for segment in segments])
        plans = ready.learnable([rows[0] for rows in answers]) if engine.learn else ready.plans
        for n, (plan, buffer) in enumerate(zip(plans, buffers, strict=True)):
            if engine.learn and buffer is not None:
                _learn(engine, plan, buffer, segments[n], call.labels[n], planning(policy))
            learned.append(time.perf_counter())
    replies = [
        Reply(
            text=str(engine.tokenizer.decode(list(rows[0]), skip_special_tokens=True)),
            texts=tuple(str(engine.tokenizer.decode(list(row), skip_special_tokens=True)) for row in rows),
            token_ids=rows[0],
            segment=segments[n],
            output=output,
            ttft_s=first - began,
            prefill_s=prepared - began,
            wall_s=finished - began,
            learn_s=learned[n + 1] - learned[n],
            usage=Usage.of(plan.counts, sum(map(len, rows))),
            plan=plan.spending((first - prepared) / len(answers), range(ready.tails[n], len(plan.prompt))).without_kv(),
            pool_version=engine.version,
            exactness=ready.report(began, clock) if isinstance(policy, Healed | Verified) else None,
        )
        for n, (plan, rows) in enumerate(zip(ready.plans, answers, strict=True))
    ]
    for reply, label in zip(replies, call.labels, strict=True):
        log.info(
            "%s: %s, first token after %.3f s, all after %.3f s",
            label or "call",
            reply.usage,
            reply.ttft_s,
            reply.wall_s,
        )
        log.debug("%s", reply.plan)
    return replies


def _check(call: Call) -> None:
    need(call.stopping_criteria, (list, tuple), "stopping_criteria", "pass a list of them, or nothing")
    for label in call.labels:
        check_label(label)
    if call.started is not None and not isinstance(call.started, int | float):
        raise InvalidInput(f"started is {call.started!r}; pass time.perf_counter() as it was, or nothing")


def _new_tokens(engine: Core, call: Call, settings: Settings) -> int:
    """How many tokens may be generated; checks the prompts' types and, where a number was asked for, their lengths."""
    for prompt in call.prompts:
        need(prompt, Prompt, "the prompt", "make one with agent.prompt(slot=...)")
    asked = call.max_new_tokens if call.max_new_tokens is not None else settings.max_new_tokens
    if asked is None:
        left = engine.backend.spec.max_positions - max(map(len, call.prompts))
        asked = max(min(DEFAULT_NEW_TOKENS, left), 1)
    need(asked, Integral, "max_new_tokens", "ask for 1 or more")
    asked = int(asked)
    if asked < 1:
        raise InvalidInput(f"max_new_tokens is {asked}; ask for at least 1")
    for prompt in call.prompts:
        engine._check(prompt.token_ids, len(prompt) + asked)
    return asked


@dataclass(frozen=True)
class _One:
    """A prompt that generate continues in the buffer that it was prefilled in."""

    prefilled: Prefilled
    tail: int
    criteria: Sequence[StoppingCriteria] = ()
    first: float | None = None

    @property
    def plans(self) -> list[Plan]:
        return [self.prefilled.plan]

    @property
    def tails(self) -> list[int]:
        return [self.tail]

    def generate_kwargs(self) -> dict[str, Any]:
        return self.prefilled.generate_kwargs()

    def take_back(self, replies: Sequence[int]) -> list[KVBuffer | None]:
        return [self.prefilled.buffer if self.prefilled.take_back() else None]

    def learnable(self, answers: Sequence[Sequence[int]]) -> list[Plan]:
        return self.plans

    def report(self, began: float, clock: Clock) -> Exactness:
        """Of a call in which nothing was approximate."""
        return Exactness(0, 0.0, 0, 0, tuple(t - began for t in clock.times), 0)


@dataclass(frozen=True)
class _Many:
    """Prompts, or copies of one, in rows of a cache of their own."""

    rows: Rows
    plans: list[Plan]
    cache_name: str
    pad: int
    criteria: Sequence[StoppingCriteria] = ()
    first: float | None = None

    @property
    def tails(self) -> list[int]:
        return [len(prompt) - 1 for prompt in self.rows.prompts]

    def generate_kwargs(self) -> dict[str, Any]:
        return self.rows.generate_kwargs(self.cache_name, self.pad)

    def take_back(self, replies: Sequence[int]) -> Sequence[KVBuffer | None]:
        return self.rows.take_back(replies)

    def learnable(self, answers: Sequence[Sequence[int]]) -> list[Plan]:
        return self.plans

    def report(self, began: float, clock: Clock) -> None:
        return None  # policies that heal take one row


def _single(
    engine: Core, call: Call, settings: Settings, new_tokens: int, claimed: Claimed
) -> _One | HealedOne | VerifiedOne:
    policy = call.policy if call.policy is not None else engine.policy
    prompt, heals = call.prompts[0], isinstance(policy, Healed | Verified)
    planner = planning(policy)
    if heals and engine._crosses(len(prompt) + new_tokens):
        planner = Exact()  # LongRoPE may turn its frequencies over on the way, and healing would compute across that
    prefilled = engine.prefill(prompt, room=new_tokens, policy=planner if heals else call.policy)
    going_on = exactly(engine.backend, policy, prefilled, settings, engine.tokenizer) if heals else None
    return going_on or _One(prefilled, prefilled.buffer.length, claimed.criteria(prefilled))


def _rows(engine: Core, call: Call, settings: Settings, new_tokens: int) -> _Many:
    if len({engine._crosses(len(prompt)) for prompt in call.prompts}) > 1:
        raise InvalidInput(
            f"prompts of {sorted(map(len, call.prompts))} tokens lie on both sides of the length of "
            f"{engine.backend.spec.rope.switch_length} at which LongRoPE changes its frequencies; generate them apart"
        )
    plans: list[Plan] = []

    def filled() -> Iterator[KVBuffer]:
        for prompt in call.prompts:
            prefilled = engine.prefill(prompt, room=0, policy=call.policy)
            began, start = time.perf_counter(), prefilled.buffer.length
            engine._finish(prefilled.buffer, prompt.token_ids[:-1])
            plans.append(prefilled.plan.spending(time.perf_counter() - began, range(start, len(prompt) - 1)))
            yield prefilled.buffer

    rows = Rows.of(engine.backend.spec, call.prompts, filled(), new_tokens, settings.copies, engine.backend.layout)
    return _Many(rows, plans, cache_argument(engine.model), settings.pad)


def _answers(output: Any, settings: Settings, start: int, prompts: int) -> list[list[tuple[int, ...]]]:
    """For each prompt the ids of its sequences, the best first where beams rank them, without padding."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    several = sequences.shape[0] > 1
    found = [_unpadded(row, settings, several) for row in sequences[:, start:].tolist()]
    each = len(found) // prompts
    return [found[n * each : (n + 1) * each] for n in range(prompts)]


def _unpadded(row: Sequence[int], settings: Settings, several: bool) -> tuple[int, ...]:
    """A row up to its end; one that something else ended, before others, was padded where generate knows an end."""
    end = next((n + 1 for n, token in enumerate(row) if token in settings.ends), None)
    if end is None and several and settings.ends:
        end = next((n for n in range(len(row), 0, -1) if row[n - 1] not in (settings.pad, -1)), 0)
    return tuple(row[:end])


def _until(token_ids: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    end = next((n for n, token in enumerate(token_ids) if token in stops), len(token_ids))
    return tuple(token_ids[:end])


def _learn(engine: Core, plan: Plan, buffer: KVBuffer, reply: Segment, label: str, policy: Policy) -> None:
    try:
        if engine._crosses(len(plan.prompt)):
            return
        if engine._crosses(len(plan.prompt) + len(reply)):
            reply = Segment(())  # the model turned to its other frequencies on the way
        engine._finish(buffer, (*plan.prompt.token_ids, *reply.token_ids))
        engine._learn_from(plan, buffer, reply, label, policy)
    except Exception as error:  # the answer is there; what could not be kept or learned costs reuse only
        log.warning("not everything was kept or learned from a call: %s", error, exc_info=error)


@contextmanager
def _ended_on_failure(streamer: Any) -> Iterator[None]:
    """End the streamer where the call fails, so that nobody waits for the rest of its text."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):
                streamer.end()
        raise
