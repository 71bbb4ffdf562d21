"""Engines on tiny models, their state, and the model's own greedy answer."""

from __future__ import annotations

from typing import Any

import torch

from kvcomm import Engine, Segment, Slot, System
from kvcomm.hf.agent import Agent
from kvcomm.reuse.policy import Balanced
from kvcomm.reuse.prompt import Prompt
from kvcomm.types import SegmentKV
from tests.reuse.scene import error
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

GREEDY = {"do_sample": False}
PLAIN = Balanced(gate=False)
"""The default policy without its predictions, which tiny random models make no sense of."""
TOLERANCE = 2e-5
"""Relative, float32: the tiny models' matmuls round differently when a prefill is cut elsewhere."""


def engine_of(family: str = "llama", **options: Any) -> Engine:
    """A fresh engine on a fresh tiny model, which never ends an answer by itself.

    Unless a policy is given, nothing it does hangs on predictions: neither of closeness nor of seconds.
    """
    options.setdefault("policy", PLAIN)
    model = FAMILIES[family]()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Engine(model, tiny_tokenizer(), **options)


def two_agents(engine: Engine) -> tuple[Agent, Agent]:
    """A writer who gets a task, and a critic who gets the task and the writer's answer."""
    writer = engine.agent("writer", [System("You write."), "Task: ", Slot("task"), "\nWrite:"])
    critic = engine.agent("critic", ["Judge this.\n", Slot("draft"), "\nThe task was: ", Slot("task"), "\nVerdict:"])
    return writer, critic


def state(engine: Engine) -> tuple[Any, ...]:
    """All that a call could change."""
    book = engine.book
    gains = {str(pair): gain.calls for pair, gain in book.gains.items()}
    return (
        engine.version,
        engine.pool.digest(),
        engine.pool.nbytes,
        book.statistics.digest(),
        gains,
        sorted(engine.agents),
    )


def plain(engine: Engine, prompt: Prompt, **options: Any) -> Any:
    """What model.generate alone returns for the prompt."""
    ids = torch.tensor([prompt.token_ids])
    return engine.model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]


def answer(engine: Engine, prompt: Prompt, tokens: int) -> tuple[int, ...]:
    """The model's own greedy answer."""
    whole = plain(engine, prompt, max_new_tokens=tokens, **GREEDY)
    return tuple(whole[0, len(prompt) :].tolist())


def kv_error(found: SegmentKV, expected: SegmentKV) -> float:
    """The larger error of keys and values."""
    return max(error(found.keys, expected.keys), error(found.values, expected.values))


def bases(engine: Engine, segment: Segment) -> list[tuple[str, str, bool]]:
    """Origin, place of capture and exactness of what is held of a text."""
    return [(b.recipe.origin, b.recipe.context, b.recipe.exact) for b in engine.pool.bases(segment)]
