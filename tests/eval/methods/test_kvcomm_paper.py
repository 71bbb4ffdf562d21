"""The published KVCOMM as a baseline: its test, weights and eviction by hand, and its calls on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch

from eval.methods.kvcomm_paper import PaperEngine
from eval.methods.paper_anchors import Anchor, AnchorPool, after_weights, entropy_passes, token_weights
from kvcomm import Dense, Engine, Slot, System
from kvcomm.errors import InvalidInput
from kvcomm.rope import rotate
from kvcomm.types import SegmentKV
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

L, H, D = 2, 1, 2


def kv(value: float, tokens: int = 3) -> SegmentKV:
    return SegmentKV(torch.full((L, H, tokens, D), value), torch.full((L, H, tokens, D), value))


def anchor(value: float, tokens: int = 3, offset: float = 0.0, behind: int = 2) -> Anchor:
    delta, after = torch.full((L, H, tokens, D), offset), torch.full((L, H, behind, D), 10 * offset)
    return Anchor(kv(value, tokens), delta, 2 * delta, after, 2 * after)


@pytest.mark.parametrize(
    ("distances", "passes"),
    [
        ([0.0, 0.0], False),  # two perfect anchors: one bit of entropy is above 0.3
        ([50.0, 60.0], True),  # both far off: almost certain of the nearer
        ([0.0, 3.0], True),  # p = 0.9526, 0.0474: 0.275 bits
        ([0.0, 2.8], False),  # p = 0.9427, 0.0573: 0.317 bits
        ([0.0, 0.0, 60.0, 60.0], False),  # one bit; the limit is 0.6
        ([0.0, 2.0, 60.0, 60.0], True),  # p = 0.8808, 0.1192: 0.527 bits
        ([5.0], False),
        ([], False),
    ],
)
def test_entropy_test_by_hand(distances: list[float], passes: bool) -> None:
    assert entropy_passes(torch.tensor(distances), 0.3) is passes


def test_weights_by_hand() -> None:
    own = torch.zeros(1, 1, 2, 2)
    anchors = torch.zeros(2, 1, 1, 2, 2)
    anchors[1, 0, 0, 0] = torch.tensor([1.0, 3.0])  # token 0: mean distance 2; token 1: equal
    anchors[1, 0, 0, 1] = torch.tensor([0.0, 0.0])
    weights = token_weights(own, anchors)[:, 0, 0, :, 0]
    near = 1 / (1 + math.exp(-2))
    torch.testing.assert_close(weights, torch.tensor([[near, 0.5], [1 - near, 0.5]]))
    anchors[1, 0, 0, 1] = torch.tensor([0.0, 4.0])  # features: 1 alone; 3 and 4 make 5
    after = after_weights(own, anchors)[:, 0, 0, 0]
    far = torch.tensor([1.0, 5.0]).neg().exp()
    torch.testing.assert_close(after, torch.stack([1 / (1 + far), far / (1 + far)]))


def test_offset_blends_and_leaves_layer_0() -> None:
    pool = AnchorPool()
    for made in (anchor(0.0, offset=1.0), anchor(2.0, offset=5.0, tokens=4), anchor(0.0, offset=9.0, tokens=2)):
        pool.add(made)
    offset = pool.offset(kv(0.0))  # the third anchor is too short
    near = 1 / (1 + math.exp(-2))
    want = near * 1 + (1 - near) * 5
    assert offset.keys.shape == (L, H, 3, D)
    torch.testing.assert_close(offset.keys[1], torch.full((H, 3, D), want))
    torch.testing.assert_close(offset.values[1], torch.full((H, 3, D), 2 * want))
    near = 1 / (1 + math.exp(-2 * math.sqrt(3)))
    torch.testing.assert_close(offset.after_keys[1], torch.full((H, 2, D), 10 * (near * 1 + (1 - near) * 5)))
    for part in (offset.keys, offset.values, offset.after_keys, offset.after_values):
        assert float(part[0].abs().max()) == 0


def test_match_needs_two_anchors_long_enough() -> None:
    pool = AnchorPool()
    pool.add(anchor(0.0))
    pool.add(anchor(50.0, tokens=2))
    assert not pool.match(kv(0.0), 0.3)
    pool.add(anchor(50.0, tokens=9))
    assert pool.match(kv(0.0), 0.3)
    assert pool.uses == [1, 0, 0]  # the nearest alone makes up 90 %
    assert not AnchorPool().match(kv(0.0), 0.3)


def test_eviction_drops_the_least_used_of_the_five_oldest() -> None:
    pool = AnchorPool(limit=7)
    made = [anchor(float(n)) for n in range(9)]
    for one in made[:7]:
        pool.add(one)
    pool.uses = [3, 1, 2, 1, 5, 0, 0]
    pool.add(made[7])
    assert pool.anchors == [made[n] for n in (0, 2, 3, 4, 5, 6, 7)]  # of the two used once the older
    assert pool.uses == [3, 2, 1, 5, 0, 0, 0]
    pool.add(made[8])
    assert pool.anchors == [made[n] for n in (0, 2, 3, 4, 6, 7, 8)]  # the sixth has come into the window
    with pytest.raises(InvalidInput, match="at least 2 anchors"):
        AnchorPool(limit=1)


def paper_engine() -> PaperEngine:
    engine = Engine(FAMILIES["llama"](), tiny_tokenizer(), weights="tiny")
    parts = [System("be brief"), "first: ", Slot("a"), " then: ", Slot("b"), " now answer"]
    engine.agent("solver", parts)
    return PaperEngine.over(engine)


TEXTS = [("one two three", "alpha beta"), ("zebra crossing at noon", "quick brown fox"), ("xyzzy plugh", "jump over")]


def test_calls_run_dense_until_two_anchors_are_there() -> None:
    paper = paper_engine()
    agent = paper.agents["solver"]
    plans = []
    for a, b in TEXTS:
        paper.isolate([agent.template.text_segment(text) for text in (a, b)])
        plans.append(agent.generate(a=a, b=b, max_new_tokens=2).plan)
    assert [plan.counts.approximate > 0 for plan in plans] == [False, False, True]
    assert {label: len(pool.anchors) for label, pool in paper.anchors.items()} == {"solver/a": 2, "solver/b": 2}
    assert plans[2].computed == (len(plans[2].prompt) - 1,)
    first = plans[2].parts[0]
    assert (first.action, plans[2].counts.exact) == ("exact", first.stop)


def test_a_forced_answer_runs_as_published_too() -> None:
    paper = paper_engine()
    agent = paper.agents["solver"]
    for a, b in TEXTS[:2]:
        agent.study(a=a, b=b)
    a, b = TEXTS[2]
    paper.isolate([agent.template.text_segment(text) for text in (a, b)])
    _, plan = agent.force("so it is", a=a, b=b)
    assert plan.counts.approximate > 0
    _, dense = agent.force("so it is", a=a, b=b, policy=Dense())
    assert dense.counts.approximate == 0


def test_one_slot_that_fails_makes_the_whole_call_dense() -> None:
    paper = paper_engine()
    agent = paper.agents["solver"]
    for a, b in TEXTS[:2]:
        agent.study(a=a, b=b)
    long = TEXTS[1][0] * 2  # longer than any anchor of slot a
    paper.isolate([agent.template.text_segment(text) for text in (long, "jump over")])
    prefilled = paper.prefill(agent.prompt(a=long, b="jump over"))
    assert prefilled.plan.counts.approximate == 0


def test_offsets_are_added_in_the_rotated_frame_of_their_anchor() -> None:
    paper = paper_engine()
    agent = paper.agents["solver"]
    for a, b in TEXTS[:2]:
        agent.study(a=a, b=b)
    a, b = TEXTS[2]
    paper.isolate([agent.template.text_segment(text) for text in (a, b)])
    prefilled = paper.prefill(agent.prompt(a=a, b=b))
    index = next(n for n, part in enumerate(prefilled.plan.parts) if part.part.label == "solver/b")
    part = prefilled.plan.parts[index]
    assert part.base is not None
    positions = torch.arange(part.start, part.stop)
    offset = paper.anchors["solver/b"].offset(part.base.kv)
    want = rotate(part.base.kv.keys, positions, paper.backend.spec.rope) + offset.keys
    torch.testing.assert_close(prefilled.buffer.keys[:, :, part.start : part.stop], want)
    after = prefilled.plan.parts[index + 1]
    assert after.base is not None
    got = prefilled.buffer.values[:, :, after.start : after.stop - 1]
    torch.testing.assert_close(got, (after.base.kv.values + offset.after_values)[:, :, :-1])


def test_forks_keep_their_anchors_and_dense_is_dense() -> None:
    paper = paper_engine()
    agent = paper.agents["solver"]
    for a, b in TEXTS[:2]:
        agent.study(a=a, b=b)
    fork = paper.fork(policy=Dense())
    before = {label: list(pool.uses) for label, pool in paper.anchors.items()}
    fork.agents["solver"].study(a="another text", b="and one more")
    a, b = TEXTS[2]
    fork.isolate([agent.template.text_segment(text) for text in (a, b)])
    reply = fork.agents["solver"].generate(a=a, b=b, max_new_tokens=1)
    assert reply.plan.counts.approximate > 0
    assert {label: pool.uses for label, pool in paper.anchors.items()} == before
    dense = fork.agents["solver"].generate(a=a, b=b, max_new_tokens=1, policy=Dense())
    assert dense.plan.counts.new == len(dense.plan.prompt)
