"""Values of the wrong kind, at every public entry: an error of kvcomm's own, before the model is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm import Balanced, Engine, Exact, KVCommError, Reuse, Segment, Slot, System
from kvcomm.hf.agent import Agent
from kvcomm.hf.forget import Conversation
from kvcomm.hf.streaming import stream_chat
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.types import Namespace
from tests.hf.engines import engine_of, two_agents
from tests.tiny_tokenizer import tiny_tokenizer

SHOWN = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
    "{% for d in documents or [] %}{{ d['text'] }}{% endfor %}"
)
SAID = [{"role": "user", "content": "hello"}]
ONE = Segment((5,))
OF_NO_KIND: tuple[Any, ...] = (-1, 1.5, b"x", [5], {5: 5}, object(), Exact)
"""Wrong wherever a text, a list of something, a prompt, a policy or a file is asked for."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "stop_strings": (5, [5], [], ""),
    "bad_words_ids": ([], [5], [["x"]], [[500]], "x"),
    "suppress_tokens": ("x", 5, ["x"]),
    "begin_suppress_tokens": ("x", 5),
    "sequence_bias": ("x", 5, {}, {(500,): 1.0}),
    "eos_token_id": ("x", [5.5], 10**30),
    "pad_token_id": ("x", 1.5),
    "bos_token_id": ("x",),
    "forced_eos_token_id": ("x", 5000),
    "num_beams": (0, "x", True),
    "num_return_sequences": (0, 2, "x"),
    "top_k": ("x",),
    "repetition_penalty": ("x", -1, 0),
    "no_repeat_ngram_size": ("x", 1.5),
    "encoder_repetition_penalty": ("x",),
    "min_length": ("x",),
    "min_new_tokens": ("x",),
    "max_time": ("x",),
    "early_stopping": ("x", 5),
    "exponential_decay_length_penalty": ("x", 5, (1, "x")),
    "guidance_scale": ("x",),
    "watermarking_config": (5, "x"),
    "generation_config": ("x", 5, {}),
    "logits_processor": (5, [5], "x"),
    "prefix_allowed_tokens_fn": (5,),
    "stopping_criteria": (5, [5], "x"),
    "streamer": (5, "x"),
    "negative_prompt_ids": (
        5,
        "x",
        torch.tensor([5]),
        torch.tensor([[0.5]]),
        torch.tensor([[999]]),
        torch.tensor([[-1]]),
    ),
    "negative_prompt_attention_mask": (5, "x"),
    "nonsense": (5,),
}
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 0, "x"),
    "top_k": (-1, 1.5),
    "top_p": (-1, "x"),
    "min_p": (2, "x"),
    "typical_p": (-1, "x"),
    "epsilon_cutoff": ("x",),
    "eta_cutoff": ("x",),
    "top_h": ("x",),
}
"""Refused where they would matter; greedy generation leaves them alone, as transformers does."""

Try = Callable[["Scene", Any], Any]
ENTRIES: dict[str, tuple[Try, tuple[Any, ...]]] = {
    "Engine(model)": (lambda s, v: Engine(v, s.tokenizer), (None, *OF_NO_KIND)),
    "Engine(tokenizer)": (lambda s, v: Engine(s.model, v), (None, *OF_NO_KIND)),
    "Engine(policy)": (lambda s, v: Engine(s.model, s.tokenizer, policy=v), OF_NO_KIND),
    "Engine(namespace)": (lambda s, v: Engine(s.model, s.tokenizer, namespace=v), (None, "", "a/b", *OF_NO_KIND)),
    "Engine(pool)": (lambda s, v: Engine(s.model, s.tokenizer, pool=v), ("x", *OF_NO_KIND)),
    "Engine(book)": (lambda s, v: Engine(s.model, s.tokenizer, book=v), ("x", *OF_NO_KIND)),
    "Engine(store)": (lambda s, v: Engine(s.model, s.tokenizer, store=v), ("x", *OF_NO_KIND)),
    "Engine(weights)": (lambda s, v: Engine(s.model, s.tokenizer, weights=v), OF_NO_KIND),
    "Engine(calibration)": (lambda s, v: Engine(s.model, s.tokenizer, calibration=v), ("x", *OF_NO_KIND)),
    "Engine(costs)": (lambda s, v: Engine(s.model, s.tokenizer, costs=v), ("x", *OF_NO_KIND)),
    "Engine(learn)": (lambda s, v: Engine(s.model, s.tokenizer, learn=v), (None, 1, "x")),
    "agent(name)": (lambda s, v: s.engine.agent(v, ["a", Slot("b")]), (None, "", "a/b", *OF_NO_KIND)),
    "agent(parts)": (lambda s, v: s.engine.agent("q", v), (None, "x", [], [[]], [None], *OF_NO_KIND)),
    "System": (lambda s, v: System(v), (None, *OF_NO_KIND)),
    "Slot": (lambda s, v: s.engine.agent("q", ["a", Slot(v)]), (None, "", "a b", *OF_NO_KIND)),
    "fork": (lambda s, v: s.engine.fork(policy=v), OF_NO_KIND),
    "generate": (lambda s, v: s.engine.generate(v, max_new_tokens=1), (None, "x", *OF_NO_KIND)),
    "generate(policy)": (lambda s, v: s.engine.generate(s.prompt, policy=v, max_new_tokens=1), OF_NO_KIND),
    "generate(max_new_tokens)": (
        lambda s, v: s.engine.generate(s.prompt, max_new_tokens=v),
        (0, True, 10**9, *OF_NO_KIND),
    ),
    "agenerate": (lambda s, v: asyncio.run(s.engine.agenerate(v, max_new_tokens=1)), (None, "x", *OF_NO_KIND)),
    "agenerate(stopping_criteria)": (
        lambda s, v: asyncio.run(s.engine.agenerate(s.prompt, max_new_tokens=1, stopping_criteria=v)),
        ("x", *OF_NO_KIND),
    ),
    "generate_batch": (
        lambda s, v: s.engine.generate_batch(v, max_new_tokens=1),
        (None, "x", [], ["x"], [[]], iter([]), *OF_NO_KIND),
    ),
    "generate_batch(a generator)": (
        lambda s, v: s.engine.generate_batch((one for one in v), max_new_tokens=1),  # type: ignore[arg-type]
        ([],),
    ),
    "generate_batch(labels)": (
        lambda s, v: s.engine.generate_batch([s.prompt], labels=v, max_new_tokens=1),
        ("x", [], ["a", "b"], *OF_NO_KIND),
    ),
    "prefill": (lambda s, v: s.engine.prefill(v), (None, "x", *OF_NO_KIND)),
    "prefill(room)": (lambda s, v: s.engine.prefill(s.prompt, room=v), (None, "x", True, 10**9, *OF_NO_KIND)),
    "force": (lambda s, v: s.engine.force(s.prompt, v), (None, "x", Segment(()), *OF_NO_KIND)),
    "force(prompt)": (lambda s, v: s.engine.force(v, ONE), (None, "x", *OF_NO_KIND)),
    "force(label)": (lambda s, v: s.engine.force(s.prompt, ONE, label=v), (None, *OF_NO_KIND)),
    "study": (lambda s, v: s.engine.study(s.prompt, v), ("x", *OF_NO_KIND)),
    "study(prompt)": (lambda s, v: s.engine.study(v), (None, "x", *OF_NO_KIND)),
    "study(label)": (lambda s, v: s.engine.study(s.prompt, label=v), (None, *OF_NO_KIND)),
    "isolate": (lambda s, v: s.engine.isolate(v), (None, "x", ["x"], [None], *OF_NO_KIND)),
    "isolate(behind)": (lambda s, v: s.engine.isolate([ONE], behind=v), ("x", *OF_NO_KIND)),
    "forget": (lambda s, v: s.engine.forget(v), (None, "x", Namespace("other"), *OF_NO_KIND)),
    "save": (lambda s, v: s.engine.save(v), (None, *OF_NO_KIND)),
    "load": (lambda s, v: s.engine.load(v), (None, "", "no-such-file", *OF_NO_KIND)),
    "a slot": (lambda s, v: s.writer.generate(task=v, max_new_tokens=1), (None, "\ud800", *OF_NO_KIND)),
    "agent.prompt": (lambda s, v: s.writer.prompt(task=v), (None, *OF_NO_KIND)),
    "agent.generate(options)": (
        lambda s, v: s.writer.generate(task="the", options=v, max_new_tokens=1),
        ("x", [], *OF_NO_KIND),
    ),
    "agent.force": (lambda s, v: s.writer.force(v, task="the"), (None, *OF_NO_KIND)),
    "agent.study": (lambda s, v: s.writer.study(answer=v, task="the"), OF_NO_KIND),
    "chat": (lambda s, v: s.chat(v), (None, "x", [], ["x"], [None], [{"content": "hello"}], *OF_NO_KIND)),
    "achat": (lambda s, v: asyncio.run(s.engine.achat(v, max_new_tokens=1)), (None, "x", *OF_NO_KIND)),
    "stream_chat": (lambda s, v: list(stream_chat(s.engine, v, max_new_tokens=1)), (None, "x", *OF_NO_KIND)),
    "stream_chat(stopping_criteria)": (
        lambda s, v: list(stream_chat(s.engine, SAID, max_new_tokens=1, stopping_criteria=v)),
        ("x", *OF_NO_KIND),
    ),
    "chat(content)": (lambda s, v: s.chat([{"role": "user", "content": v}]), OF_NO_KIND),
    "chat(role)": (lambda s, v: s.chat([{"role": v, "content": "a"}]), (None, *OF_NO_KIND)),
    "chat(tools)": (lambda s, v: s.chat(SAID, tools=v), ("x", ["x"], [None], [{}], *OF_NO_KIND)),
    "chat(a function)": (
        lambda s, v: s.chat(SAID, tools=[{"type": "function", "function": v}]),
        (None, "x", {}, *OF_NO_KIND),
    ),
    "chat(documents)": (lambda s, v: s.chat(SAID, documents=v), ("x", ["x"], [None], *OF_NO_KIND)),
    "chat(name)": (lambda s, v: s.chat(SAID, name=v), (None, "", "a/b", *OF_NO_KIND)),
    "chat(template)": (lambda s, v: s.chat(SAID, template=v), ("x", [], *OF_NO_KIND)),
    "chat(canonical)": (lambda s, v: s.chat(SAID, canonical=v), (None, 1, "x")),
    "chat(policy)": (lambda s, v: s.chat(SAID, policy=v), OF_NO_KIND),
    "Segment": (lambda s, v: Segment(v), (None, "x", 5, [-1], [1.5], [True], [2**32], ["x"])),
    "Namespace": (lambda s, v: Namespace(v), (None, *OF_NO_KIND)),
    "Conversation": (lambda s, v: Conversation(v), (None, *OF_NO_KIND)),
    "Part": (lambda s, v: Part(v, "a"), (None, "x", *OF_NO_KIND)),
    "Part(label)": (lambda s, v: Part(ONE, v), (None, *OF_NO_KIND)),
    "Prompt": (lambda s, v: Prompt(v), (None, "x", (), ("x",), *OF_NO_KIND)),
    "Balanced(select)": (lambda s, v: Balanced(select=v), (None, "x", *OF_NO_KIND)),
    "Balanced(max_kl)": (lambda s, v: Balanced(max_kl=v), ("x", 0, -1, [5])),
    "Reuse(origins)": (lambda s, v: Reuse(origins=v), (None, "x", (), ("prompt",), (("x",),), ([],), *OF_NO_KIND)),
    "Reuse(confidence)": (lambda s, v: Reuse(confidence=v), (None, "x", 0, 2)),
    "Reuse(gate)": (lambda s, v: Reuse(gate=v), (None, 1, "x")),
    "Reuse(offsets)": (lambda s, v: Reuse(offsets=v), (None, 1, "x")),
    "Reuse(dense_above)": (lambda s, v: Reuse(dense_above=v), (None, "x", True, 2, -1)),
    "Reuse(learn_first)": (lambda s, v: Reuse(learn_first=v), (None, "x", True, *OF_NO_KIND)),
    "Reuse(near)": (lambda s, v: Reuse(near=v), (None, "x", 0, 2)),
    "Reuse(after_edit)": (lambda s, v: Reuse(after_edit=v), (None, "x", *OF_NO_KIND)),
}


class Scene:
    """An engine with two agents, and how often its model was run."""

    def __init__(self) -> None:
        self.engine = engine_of(policy=Exact())
        self.engine.tokenizer.chat_template = SHOWN
        self.model, self.tokenizer = self.engine.model, tiny_tokenizer()
        self.writer: Agent = two_agents(self.engine)[0]
        self.prompt = self.writer.prompt(task="the")
        self.runs = 0
        self.model.register_forward_pre_hook(lambda *_: setattr(self, "runs", self.runs + 1))

    def chat(self, messages: Any, **options: Any) -> Any:
        return self.engine.chat(messages, max_new_tokens=1, **options)

    def refuses(self, call: Callable[[], Any]) -> str:
        """Empty where a call raises KVCommError, runs no model and leaves nothing; else what it did."""
        runs, before = self.runs, self.engine.pool.digest()
        try:
            result = call()
        except KVCommError:
            changed = self.engine.pool.digest() != before
            return (
                f"{self.runs - runs} runs of the model, pool changed: {changed}" if self.runs > runs or changed else ""
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"gave {type(result).__name__}"


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ought not to be written is not written here."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_refuses_values_of_another_kind(scene: Scene, entry: str) -> None:
    call, values = ENTRIES[entry]
    found = {repr(value): scene.refuses(lambda value=value: call(scene, value)) for value in values}
    assert {value: said for value, said in found.items() if said} == {}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", [*OPTIONS, *(f"sampling {name}" for name in SAMPLING)])
def test_a_generation_option_is_refused_before_the_prefill(scene: Scene, name: str, sample: bool) -> None:
    sampling = name.startswith("sampling ")
    name = name.removeprefix("sampling ")
    if sampling and not sample:
        given = {name: SAMPLING[name][0]}
        assert scene.engine.generate(scene.prompt, max_new_tokens=1, do_sample=False, **given).token_ids
        return
    for value in (SAMPLING if sampling else OPTIONS)[name]:
        if name == "num_return_sequences" and sample and value == 2:
            continue  # two samples are nothing wrong
        options = {"do_sample": sample, name: value}
        said = scene.refuses(lambda options=options: scene.engine.generate(scene.prompt, max_new_tokens=1, **options))
        assert not said, (name, value, said)


def test_what_transformers_said_is_the_cause(scene: Scene) -> None:
    with pytest.raises(KVCommError, match="temperature.* has to be a strictly positive float") as raised:
        scene.engine.generate(scene.prompt, max_new_tokens=1, do_sample=True, temperature=-1.0)
    assert isinstance(raised.value.__cause__, ValueError)
