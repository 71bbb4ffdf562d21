"""The Engine on texts that are nearly ones it holds: what is said of them, kept of them, learned from them."""

from __future__ import annotations

import torch

from kvcomm import Balanced, Dense, Engine, Fast, Segment
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.select import Leading
from tests.hf.engines import GREEDY, bases, engine_of, state, two_agents

TASK = "Return the two largest numbers of a list, without sorting the list first."
NEARLY = TASK.replace("two", "ten").replace("numbers", "integers")
FAST = Fast(near=0.8, learn_first=0, dense_above=1.0)


def taught(policy: Reuse = FAST) -> Engine:
    engine = engine_of(policy=policy)
    two_agents(engine)[0].study(task=TASK)
    return engine


def test_the_reply_says_what_was_reused_and_why() -> None:
    engine = taught()
    writer = engine.agents["writer"]
    reply = writer.generate(task=NEARLY, max_new_tokens=4, options=GREEDY)
    (part,) = [part for part in reply.plan.parts if part.part.label == "writer/task"]
    text = part.part.segment
    assert part.match is not None and part.action == "approximate"
    absent = len(part.match.absent)
    assert 0 < absent < 0.2 * len(text)
    assert f"{absent} of {len(text)} tokens differ from a held text of" in part.why and part.why in str(reply.plan)
    assert reply.plan.counts.new == absent + (reply.plan.parts[-1].action == "new") * len(reply.plan.parts[-1].computed)
    assert 0 < reply.usage.approximate < len(reply.plan.prompt)
    assert bases(engine, text) == []  # nothing made of a near text is held


def test_everything_recomputed_is_the_dense_answer() -> None:
    engine = taught()
    writer, reply = engine.agents["writer"], Segment(tuple(range(30, 50)))
    everything = Reuse(near=0.8, select=Leading(10**6), dense_above=1.0, learn_first=0)
    near, plan = writer.force(reply, task=NEARLY, policy=everything)
    dense, _ = writer.force(reply, task=NEARLY, policy=Dense())
    assert any(part.match is not None for part in plan.parts) and plan.counts.approximate == 0
    torch.testing.assert_close(near, dense, rtol=0, atol=1e-4)


def test_near_off_computes_the_text() -> None:
    engine = taught(Fast(learn_first=0, near=1.0))
    plan = engine.prefill(engine.agents["writer"].prompt(task=NEARLY)).plan
    assert all(part.match is None for part in plan.parts)


def test_texts_that_are_always_near_do_not_keep_a_place_learning() -> None:
    """Such a text shows no offset when it is computed densely, so nothing waits for it."""
    engine = engine_of(policy=Balanced(gate=False, near=0.8, dense_above=1.0))
    writer, _ = two_agents(engine)
    whys = []
    for number in range(5):
        task = f"{TASK[:30]}{number}{TASK[31:]}"
        reply = writer.generate(task=task, max_new_tokens=3, options=GREEDY)
        whys.append(reply.plan.why)
    assert whys[-1] == "reuse" and any(part.match is not None for part in reply.plan.parts)


def test_a_fork_sees_near_texts_and_leaves_no_trace() -> None:
    engine = taught()
    before = state(engine)
    fork = engine.fork()
    reply = fork.agents["writer"].generate(task=NEARLY, max_new_tokens=4, options=GREEDY)
    assert any(part.match is not None for part in reply.plan.parts)
    assert state(engine) == before


def test_other_namespaces_see_nothing() -> None:
    engine = taught()
    other = Engine(engine.model, engine.tokenizer, policy=FAST, namespace="other")
    reply = two_agents(other)[0].generate(task=NEARLY, max_new_tokens=2, options=GREEDY)
    assert reply.plan.counts.new == len(reply.plan.prompt)
