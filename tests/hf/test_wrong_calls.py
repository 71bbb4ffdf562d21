"""What is wrong with a call is said before anything is computed, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcomm import Engine
from kvcomm.errors import InvalidInput
from kvcomm.reuse.policy import Exact
from kvcomm.reuse.select import Leading, PerSegment, PredictedError
from tests.hf.engines import engine_of, two_agents

SHOWN = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
WRONG: dict[str, Callable[[Engine, Any], Any]] = {
    "a number for a label": lambda e, p: e.generate(p, label=5, max_new_tokens=1),
    "bytes for a label": lambda e, p: e.generate(p, label=b"a", max_new_tokens=1),
    "a label that is no UTF-8": lambda e, p: e.generate(p, label="\ud800", max_new_tokens=1),
    "one text for labels": lambda e, p: e.generate_batch([p, p], labels="ab", max_new_tokens=1),
    "a prompt for prompts": lambda e, p: e.generate_batch(p, max_new_tokens=1),
    "no prompts at all": lambda e, p: e.generate_batch(None, max_new_tokens=1),
    "a word for a time": lambda e, p: e.generate(p, started="x", max_new_tokens=1),
    "no list of criteria": lambda e, p: e.generate(p, stopping_criteria=5, max_new_tokens=1),
    "use_cache=0": lambda e, p: e.generate(p, use_cache=0, max_new_tokens=1),
    "no beams": lambda e, p: e.generate(p, num_beams=0, max_new_tokens=1),
    "a word for beams": lambda e, p: e.generate(p, num_beams="x", max_new_tokens=1),
    "half a sequence": lambda e, p: e.generate(p, num_return_sequences=1.5, max_new_tokens=1),
    "a role that is no UTF-8": lambda e, p: e.chat([{"role": "\ud800", "content": "hello"}], max_new_tokens=1),
    "a cut prompt": lambda e, p: e.chat([{"role": "user", "content": "hello"}], template={"truncation": True}),
    "no generation prompt": lambda e, p: e.chat(
        [{"role": "user", "content": "hello"}], template={"add_generation_prompt": False}
    ),
    "no template arguments": lambda e, p: e.chat([{"role": "user", "content": "hello"}], template=5),
    "a template that divides by zero": lambda e, p: e.chat(
        [{"role": "user", "content": "hello"}], template={"chat_template": "{{ 1/0 }}"}
    ),
    "no score": lambda e, p: PerSegment(2, Leading(1)),  # type: ignore[arg-type]
    "a word for a share": lambda e, p: PredictedError("x"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG)
def test_is_refused_and_leaves_nothing(wrong: str, tmp_path: Path) -> None:
    engine = engine_of(policy=Exact())
    engine.tokenizer.chat_template = SHOWN
    writer, _ = two_agents(engine)
    before = engine.pool.digest()
    with pytest.raises(InvalidInput):
        WRONG[wrong](engine, writer.prompt(task="the"))
    assert engine.pool.digest() == before
    engine.save(tmp_path / "pool")
