"""A tiny model that says what a test wants it to say, through model.generate's own constraint."""

from __future__ import annotations

from typing import Any

from kvcomm import Engine, Exact
from tests.hf.engines import engine_of

END = 5
"""``<|im_end|>`` of the tiny tokenizer."""


def engine_with(template: str | None = None, **options: Any) -> Engine:
    """An engine that reuses exactly, with the tiny tokenizer's own chat template or another."""
    engine = engine_of(**{"policy": Exact(), **options})
    if template is not None:
        engine.tokenizer.chat_template = template
    return engine


def saying(engine: Engine, text: str) -> dict[str, Any]:
    """Options with which an answer is ``text`` and the end of the turn."""
    ids = [*engine.tokenizer(text, add_special_tokens=False)["input_ids"], END]
    begun: list[int] = []

    def allowed(row: int, so_far: Any) -> list[int]:
        if not begun:
            begun.append(len(so_far))
        return [ids[min(len(so_far) - begun[0], len(ids) - 1)]]

    return {"do_sample": False, "max_new_tokens": len(ids), "eos_token_id": END, "prefix_allowed_tokens_fn": allowed}
