"""Taught engines on tiny models whose calls reuse approximately, and bases that are spoiled on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from kvcomm import Balanced, Engine
from kvcomm.reuse.prompt import Prompt
from tests.hf.engines import engine_of, plain, two_agents

FREE = Balanced(gate=False, learn_first=0, dense_above=1.0)
"""Reuses from the first call on, however little."""
WORDS = "the one day in another engine or on an hour the man ran then than there and over".split()


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def taught(family: str = "llama", texts: int = 4, **options: Any) -> tuple[Engine, list[Prompt]]:
    """An engine that has learned from two agents, frozen unless told otherwise, and prompts that mix what it knows."""
    draw = random.Random(7)
    engine = engine_of(family, policy=FREE)
    writer, critic = two_agents(engine)
    known = [text(draw, 6 + n) for n in range(texts)]
    for n, task in enumerate(known):
        writer.study(task=task)
        critic.study(task=task, draft=known[n - 1])
    options = {"learn": False, **options}
    frozen = Engine(engine.model, engine.tokenizer, policy=FREE, pool=engine.pool, book=engine.book, **options)
    _, critic = two_agents(frozen)
    prompts = [critic.prompt(task=a, draft=b) for a in known for b in known if a != b]
    prompts += [critic.prompt(task=task, draft=text(draw, 5)) for task in known]
    return frozen, prompts


@torch.inference_mode()
def spoil(engine: Engine, prompts: Sequence[Prompt], value: float = 1e4) -> None:
    """Overwrite all KV but what the prompts reuse exactly: drafts over it are wrong."""
    heads = {(part.segment.digest, before) for p in prompts for part, before in zip(p.parts, p.preceding, strict=True)}
    for base in engine.pool:
        if not base.recipe.exact or (base.segment.digest, base.recipe.preceding) not in heads:
            base.kv.keys.fill_(value)
            base.kv.values.fill_(value)


def plain_answer(engine: Engine, prompt: Prompt, **options: Any) -> list[int]:
    """The model's own answer, without kvcomm."""
    whole = plain(engine, prompt, **options)
    sequences = whole if isinstance(whole, torch.Tensor) else whole.sequences
    return sequences[0, len(prompt) :].tolist()
