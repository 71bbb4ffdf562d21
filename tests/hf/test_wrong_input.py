"""Wrong input: the error names value, limit and remedy, and pool, book and engine stay as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvcomm import Balanced, Engine, Exact, InvalidInput, Segment, Slot
from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.errors import FingerprintMismatch, PromptTooLong
from kvcomm.keys import Recipe
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import SegmentKV
from tests.hf.engines import GREEDY, engine_of, state, two_agents
from tests.tiny_models import MAX_POSITIONS
from tests.tiny_tokenizer import tiny_tokenizer

LONG = Segment((9,) * (MAX_POSITIONS + 1))
OUTSIDE = Segment((5, 128))


@pytest.fixture
def engine() -> Engine:
    """An engine that has learned something."""
    made = engine_of(policy=Balanced(gate=False, learn_first=0))
    writer, critic = two_agents(made)
    for n in range(3):
        writer.study(task=f"Task {n}")
        critic.study(task=f"Task {n}", draft=f"Draft {n}")
    return made


@dataclass(frozen=True)
class Wrong:
    """A wrong call and what its error must say."""

    call: Callable[[Engine], Any]
    said: tuple[str, ...]
    error: type[Exception] = InvalidInput


def writer(engine: Engine, **given: Any) -> Any:
    return engine.agents["writer"].generate(**{"max_new_tokens": 2, "options": GREEDY, **given})


def prompt_of(segment: Segment) -> Prompt:
    return Prompt((Part(segment, "x/#0"),))


def foreign(engine: Engine, **change: Any) -> BasePool:
    return BasePool(engine.namespace, replace(engine.backend.spec.fingerprint, **change))


def half(engine: Engine) -> SegmentKV:
    f = engine.backend.spec.fingerprint
    zeros = torch.zeros(f.n_layers, f.n_kv_heads, 2, f.head_dim, dtype=torch.bfloat16)
    return SegmentKV(zeros, zeros)


RECIPE = Recipe("prompt", "writer/task", "p", True)
CALLS: dict[str, Wrong] = {
    "empty prompt": Wrong(lambda e: e.generate(Prompt(())), ("0 tokens", "at least one")),
    "slot not filled": Wrong(lambda e: writer(e), ("'writer'", "not filled: ['task']", "once, by name")),
    "unknown slot": Wrong(lambda e: writer(e, task="t", tusk="t"), ("unknown: ['tusk']", "slots ['task']")),
    "slot of another type": Wrong(lambda e: writer(e, task=3), ("slot 'task'", "int", "pass str")),
    "token outside": Wrong(lambda e: writer(e, task=OUTSIDE), ("128", "vocabulary of 128", "own tokenizer")),
    "answer outside": Wrong(lambda e: e.agents["writer"].study(task="t", answer=OUTSIDE), ("128", "vocabulary")),
    "forced outside": Wrong(lambda e: e.agents["writer"].force(OUTSIDE, task="t"), ("128", "vocabulary")),
    "isolated outside": Wrong(lambda e: e.isolate([Segment((8, 9)), OUTSIDE]), ("128", "vocabulary")),
    "prompt too long": Wrong(lambda e: writer(e, task=LONG), ("4096 positions", "shorten a slot"), PromptTooLong),
    "answer too long": Wrong(lambda e: writer(e, task="t", max_new_tokens=5000), ("5000", "4096"), PromptTooLong),
    "study too long": Wrong(
        lambda e: e.study(prompt_of(Segment((9,) * 4000)), Segment((9,) * 97)), ("4097", "4096"), PromptTooLong
    ),
    "isolated too long": Wrong(lambda e: e.isolate([Segment((8, 9)), LONG]), ("4096",), PromptTooLong),
    "nothing to force": Wrong(lambda e: e.agents["writer"].force("", task="t"), ("0 tokens",)),
    "no new tokens": Wrong(lambda e: writer(e, task="t", max_new_tokens=0), ("max_new_tokens is 0", "at least 1")),
    "negative room": Wrong(lambda e: e.prefill(prompt_of(Segment((9,))), room=-1), ("room is -1", "0 or more")),
    "another template": Wrong(lambda e: e.agent("writer", ["Else"]), ("'writer'", "choose another name")),
    "same text, other slot": Wrong(
        lambda e: e.agent("critic", ["Judge this.\n", Slot("d"), "\nThe task was: ", Slot("task"), "\nVerdict:"]),
        ("'critic'", "choose another name"),
    ),
    "wrong dtype": Wrong(lambda e: e.pool.put(Segment((1, 2)), RECIPE, half(e)), ("bfloat16", "float32", "again")),
    "pool of other weights": Wrong(
        lambda e: Engine(e.model, e.tokenizer, pool=foreign(e, weights="w")),
        ("BasePool", "fingerprint"),
        FingerprintMismatch,
    ),
    "pool of another dtype": Wrong(
        lambda e: Engine(e.model, e.tokenizer, pool=foreign(e, dtype="bfloat16")), ("fingerprint",), FingerprintMismatch
    ),
    "pool of another tokenizer": Wrong(
        lambda e: Engine(e.model, tiny_tokenizer(bos=False), pool=e.pool), ("fingerprint",), FingerprintMismatch
    ),
    "book of another model": Wrong(
        lambda e: Engine(e.model, e.tokenizer, book=OffsetBook(foreign(e, rope="r").fingerprint)),
        ("OffsetBook", "fingerprint"),
        FingerprintMismatch,
    ),
    "another namespace's pool": Wrong(
        lambda e: Engine(e.model, e.tokenizer, namespace="theirs", pool=e.pool), ("default", "theirs")
    ),
    "bad namespace": Wrong(lambda e: Engine(e.model, e.tokenizer, namespace="a/b"), ("'a/b'", "choose such a name")),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_change_nothing(engine: Engine, name: str) -> None:
    wrong, before = CALLS[name], state(engine)
    with pytest.raises(wrong.error) as caught:
        wrong.call(engine)
    assert type(caught.value) is wrong.error
    for said in wrong.said:
        assert said in str(caught.value), said
    assert state(engine) == before
    reply = writer(engine, task="Task 1")  # and it goes on working
    assert reply.usage.exact > 0


ARGUMENTS: dict[str, Any] = {
    "input_ids": torch.ones(1, 2, dtype=torch.int64),
    "inputs": torch.ones(1, 2, dtype=torch.int64),
    "inputs_embeds": torch.ones(1, 2, 64),
    "attention_mask": torch.ones(1, 2),
    "position_ids": torch.ones(1, 2),
    "past_key_values": object(),
    "cache": object(),
    "cache_implementation": "static",
    "use_cache": False,
    "max_new_tokens": 3,
    "label": "x",
    "policy": Exact(),
    "max_length": 30,
    "prefill_chunk_size": 8,
    "token_healing": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_model": object(),
    "assistant_early_exit": 1,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_fight_the_cache_are_refused_by_name(engine: Engine, name: str) -> None:
    before = state(engine)
    with pytest.raises(InvalidInput, match=f"^{name}="):
        writer(engine, task="t", options={name: ARGUMENTS[name]})
    assert state(engine) == before


@pytest.mark.parametrize("name", ["cache_implementation", "use_cache", "prompt_lookup_num_tokens"])
def test_also_inside_a_generation_config(engine: Engine, name: str) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(**{name: ARGUMENTS[name]})
    with pytest.raises(InvalidInput, match=name):
        writer(engine, task="t", options={"generation_config": config})
    fine = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    assert len(writer(engine, task="t", options={"generation_config": fine}).token_ids) == 2


def test_a_model_changed_afterwards_is_refused(engine: Engine) -> None:
    before = state(engine)
    engine.model.train()
    with pytest.raises(InvalidInput, match=r"model.eval\(\)"):
        writer(engine, task="t")
    engine.model.eval()
    with torch.no_grad():
        next(engine.model.parameters()).add_(0.1)
    for call in (
        writer,
        lambda e, task: e.agents["writer"].study(task=task),
        lambda e, task: e.isolate([Segment((7,))]),
    ):
        with pytest.raises(FingerprintMismatch, match="build a new Engine"):
            call(engine, task="t")
    assert state(engine) == before


def test_a_generation_that_fails_changes_nothing(engine: Engine) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    before = state(engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        writer(engine, task="new", options={"stopping_criteria": [broken]})
    assert state(engine) == before


def test_exact_is_the_policy_for_one_call(engine: Engine) -> None:
    reply = writer(engine, task="Task 1", policy=Exact())
    assert reply.usage.approximate == 0


def test_a_prompt_or_policy_of_another_type_is_named() -> None:
    engine = engine_of()
    writer, _ = two_agents(engine)
    before = state(engine)
    with pytest.raises(InvalidInput, match="prompt is .hello. .str."):
        engine.prefill("hello")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="'exact'"):
        writer.generate(task="a", policy="exact", max_new_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="options="):
        writer.generate(task="a", do_sample=True, max_new_tokens=1)
    assert state(engine) == before
