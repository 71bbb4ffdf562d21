"""What a reply shows: its text, counts as chat services give them, a plan for people, and a line in the log."""

from __future__ import annotations

import logging

import pytest

from kvcomm import Exact, Fast
from tests.hf.engines import GREEDY, engine_of, two_agents


def test_a_reply_prints_its_text_and_shows_itself_in_one_line() -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    reply = writer.generate(task="Go on and on.", max_new_tokens=60, options=GREEDY)
    assert str(reply) == reply.text == reply.texts[0]
    assert repr(reply).startswith(f"Reply({reply.text[:40]!r}"[:-1]) and len(repr(reply)) < 300
    assert "\n" not in repr(reply) and "tensor" not in repr(reply)


def test_usage_counts_exact_and_approximate_apart() -> None:
    engine = engine_of(policy=Fast(learn_first=0))
    writer, critic = two_agents(engine)
    draft = writer.generate(task="Name a colour.", max_new_tokens=10, options=GREEDY)
    usage = critic.generate(draft=draft, task="Name a colour.", max_new_tokens=3, options=GREEDY).usage
    assert usage.approximate > 0 and usage.cached_tokens == usage.exact + usage.approximate
    cached = f"{usage.cached_tokens} cached: 0 exact, {usage.approximate} approximate"
    assert str(usage) == f"{usage.prompt_tokens} prompt tokens ({cached}), 3 completion tokens"
    several = writer.generate(task="x", max_new_tokens=4, options={"do_sample": True, "num_return_sequences": 3})
    assert several.usage.completion_tokens == 12 and len(several.texts) == 3


@pytest.mark.parametrize("policy", [Exact(), Fast(learn_first=0)])
def test_a_plan_says_for_each_segment_what_was_done_why_and_in_what_time(policy: Exact | Fast) -> None:
    engine = engine_of(policy=policy)
    writer, critic = two_agents(engine)
    writer.study(task="Name a colour.")
    reply = critic.generate(draft="Red is one.", task="Name a colour.", max_new_tokens=3, options=GREEDY)
    plan = reply.plan
    head, *lines = str(plan).splitlines()
    assert len(lines) == len(plan.parts) == len(plan.seconds)
    assert f"{sum(plan.seconds):.3f} s" in head
    for line, part, seconds in zip(lines, plan.parts, plan.seconds, strict=True):
        assert part.part.label in line and part.action in line and line.endswith(part.why)
        assert f"{len(part.part.segment)} tokens  {seconds:.3f} s" in line
    assert all(seconds > 0 for seconds, part in zip(plan.seconds, plan.parts, strict=True) if len(part.part.segment))
    assert sum(plan.seconds) <= reply.ttft_s


def test_the_log_has_a_line_a_call_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(policy=Exact())
    writer, _ = two_agents(engine)
    with caplog.at_level(logging.DEBUG, logger="kvcomm"):
        writer.generate(task="swordfish", max_new_tokens=3, options=GREEDY)
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(info) == 1 and info[0].startswith("writer/reply: ") and "first token after" in info[0]
    assert "swordfish" not in caplog.text and "not held for this prefix" in caplog.text
    assert not logging.getLogger("kvcomm").handlers
