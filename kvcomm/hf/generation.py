"""One call: prefill with reuse, the model's own generate, and afterwards what is kept and learned from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvcomm.errors import InvalidInput
from kvcomm.hf.arguments import Clock, check_generate_arguments, stop_tokens
from kvcomm.hf.reply import Prefilled, Reply, Usage
from kvcomm.reuse.policy import Policy
from kvcomm.reuse.prompt import Prompt
from kvcomm.types import Segment

if TYPE_CHECKING:
    from kvcomm.hf.engine import Engine

log = logging.getLogger(__name__)


def generate(
    engine: Engine,
    prompt: Prompt,
    label: str,
    max_new_tokens: int,
    policy: Policy | None,
    stopping_criteria: Sequence[StoppingCriteria],
    started: float | None,
    generate_kwargs: Mapping[str, Any],
) -> Reply:
    """See Engine.generate."""
    began = time.perf_counter() if started is None else started
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
    check_generate_arguments(generate_kwargs)
    prefilled = engine.prefill(prompt, room=max_new_tokens, policy=policy)
    prepared = time.perf_counter()
    clock = Clock()
    arguments = {**prefilled.generate_kwargs(), "max_new_tokens": max_new_tokens, **generate_kwargs}
    arguments["stopping_criteria"] = StoppingCriteriaList([*stopping_criteria, clock])
    model_generate: Any = engine.model.generate
    with torch.inference_mode():
        output = model_generate(**arguments)
    finished = time.perf_counter()
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    token_ids = tuple(sequences[0, len(prompt) :].tolist())
    stops = stop_tokens(engine.model, engine.tokenizer, generate_kwargs)
    end = next((n for n, token in enumerate(token_ids) if token in stops), len(token_ids))
    segment = Segment(token_ids[:end])
    if engine.learn:
        try:
            _after(engine, prefilled, segment, label, policy or engine.policy)
        except Exception as error:  # the answer is there; what could not be kept or learned costs reuse only
            log.warning("not everything was kept or learned from a call: %s", error, exc_info=error)
    return Reply(
        text=str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
        token_ids=token_ids,
        segment=segment,
        output=output,
        ttft_s=(clock.first or finished) - began,
        prefill_s=prepared - began,
        wall_s=finished - began,
        learn_s=time.perf_counter() - finished,
        usage=Usage.of(prefilled.plan.counts, len(token_ids)),
        plan=prefilled.plan,
        pool_version=engine.version,
    )


def _after(engine: Engine, prefilled: Prefilled, reply: Segment, label: str, policy: Policy) -> None:
    plan, buffer = prefilled.plan, prefilled.buffer
    if not prefilled.take_back() or engine._crosses(len(plan.prompt)):
        return
    if engine._crosses(len(plan.prompt) + len(reply)):
        reply = Segment(())  # the model turned to its other frequencies on the way
    engine._finish(buffer, (*plan.prompt.token_ids, *reply.token_ids))
    engine._learn_from(plan, buffer, reply, label, policy)
