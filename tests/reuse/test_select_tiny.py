"""Selections on a tiny real model: passes reach it, and choosing more brings the KV nearer to the dense run's."""

from __future__ import annotations

import pytest

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.keys import Recipe
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.run import prepare
from kvcomm.reuse.select import (
    Attended,
    Deviation,
    Leading,
    LeadingShare,
    PredictedError,
    Product,
    Selection,
    Union,
)
from kvcomm.reuse.splice import cut
from kvcomm.types import Namespace, Segment
from tests.tiny_backend import tiny_backend

LENGTHS = (6, 30, 5, 40, 4)
HELD = (1, 3, 4)  # parts spliced from bases computed alone; 0 and 2 are new


def prompt() -> Prompt:
    ids = [(13 * n + n * n // 7 + 5) % 128 for n in range(sum(LENGTHS))]
    parts, at = [], 0
    for n, length in enumerate(LENGTHS):
        parts.append(Part(Segment(tuple(ids[at : at + length])), f"a/{n}"))
        at += length
    return Prompt(tuple(parts))


def carried_out(family: str, select: Selection) -> tuple[Plan, float]:
    """The plan and the squared distance of its KV from the dense run's, over all layers."""
    backend = tiny_backend(family)
    made = prompt()
    fingerprint = backend.spec.fingerprint
    pool, book = BasePool(Namespace("t"), fingerprint), OffsetBook(fingerprint)
    for n in HELD:
        segment = made.parts[n].segment
        alone = KVBuffer(backend.spec, len(segment))
        backend.forward(alone, segment.token_ids, range(len(segment)), 0)
        pool.put(segment, Recipe("isolated", "", "none", False), cut(alone, backend.spec, 0, len(segment)))
    policy = Reuse(select=select, dense_above=1.0, offsets=False)
    plan, buffer = prepare(backend, policy.plan(made, pool, book), policy, book, 1)
    start, ids = buffer.length, made.token_ids
    backend.forward(buffer, ids[start:], range(start, len(ids)), 0)
    dense = KVBuffer(backend.spec, len(ids))
    backend.forward(dense, ids, range(len(ids)), 0)
    end = len(ids)
    pairs = (buffer.keys, dense.keys), (buffer.values, dense.values)
    return plan, sum(float((a[:, :, :end] - b[:, :, :end]).square().sum()) for a, b in pairs)


@pytest.mark.parametrize("kind", [LeadingShare, Deviation, Attended, PredictedError])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_more_recompute_is_nearer_and_all_of_it_is_dense(family: str, kind: type[Deviation]) -> None:
    approximate = sum(LENGTHS[n] for n in HELD)
    away = []
    for share in (0.0, 0.5, 1.0):
        plan, distance = carried_out(family, kind(share))
        chosen = sum(len(part.recompute) for part in plan.parts)
        slack = len(HELD) / 2 if kind is LeadingShare else 0.5
        assert abs(chosen - share * approximate) <= slack
        away.append(distance)
    assert away[2] < 1e-4 * away[0]
    assert away[1] < away[0]


def test_costs_are_counted() -> None:
    assert carried_out("llama", Leading(4))[0].extra_tokens == 0
    plan, _ = carried_out("llama", Deviation(0.5))
    assert plan.extra_tokens == pytest.approx(37 * 2 / 3)  # 37 of 74 tokens kept, two of three layers computed for them
    plan, _ = carried_out("llama", Attended(0.5))
    assert plan.extra_tokens == LENGTHS[0] + LENGTHS[2] + LENGTHS[4]
    assert plan.parts[4].recompute == (81, 82, 83, 84)  # the question, spliced, is computed first
    assert plan.reuse_rate == pytest.approx((37 - 15) / 85)


def test_deviation_leaves_the_first_layers_exact() -> None:
    backend = tiny_backend("llama")
    _, all_layers = carried_out("llama", Leading(0))
    _, early = carried_out("llama", Deviation(0.0, layer=2))  # of three: all but the last layer's outputs
    assert early < 1e-6 * all_layers
    assert backend.spec.fingerprint.n_layers == 3


def test_combinations_run() -> None:
    both = Product(0.3, (PredictedError(0.0), Attended(0.0)))
    plan, distance = carried_out("llama", Union(Leading(2), both))
    assert distance < carried_out("llama", Leading(2))[1]
    spliced = [part for part in plan.parts if part.action == "approximate"]
    assert all({part.start, part.start + 1} <= set(part.recompute) for part in spliced)
