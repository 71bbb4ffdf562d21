"""Contexts that change: the running error rises, what was learned counts less or goes, and is learned anew."""

from __future__ import annotations

import logging

import pytest
import torch

from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.drift import AGED_ABOVE, DROPPED_ABOVE, Drift
from kvcomm.anchors.offset import MeanOffset
from kvcomm.anchors.statistics import OffsetStatistics, Pair, features
from tests.anchors.synthetic import DIM, FINGERPRINT, HEADS, LAYERS, WIDTH, plus, random_kv

PAIR, OTHER = Pair("prompt", "coder/task", "critic/task"), Pair("prompt", "coder/task", "tester/task")


def seen(seed: int, by: float, pair: Pair = PAIR, tokens: int = 6) -> Observation:
    """A context that adds a constant, and noise."""
    base, noise = random_kv(tokens, seed), torch.Generator().manual_seed(seed + 1000)
    off = by + 0.2 * torch.randn(LAYERS - 1, HEADS, tokens, WIDTH, generator=noise)
    return Observation(pair, base, plus(base, off))


def test_steady_errors_change_nothing() -> None:
    drift = Drift()
    assert {drift.see(ratio) for ratio in (1.0, 1.3, 0.8, 1.2, 0.9, 1.4, 1.0, 0.7) * 5} == {"steady"}
    assert 0.5 < drift.rise < AGED_ABOVE


def test_a_step_is_aged_and_a_leap_dropped() -> None:
    small, large = Drift(), Drift()
    for _ in range(4):
        small.see(1.0), large.see(1.0)
    assert [small.see(3.5) for _ in range(3)].count("aged") >= 1 and small.dropped == 0
    assert "dropped" in [large.see(DROPPED_ABOVE**2) for _ in range(3)] and large.dropped == 1
    assert large.calls < 4  # it begins anew


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_not_taken_in(ratio: float) -> None:
    drift = Drift()
    assert drift.see(ratio) == "steady" and drift.calls == 0


def test_a_drifting_context_is_learned_anew(caplog: pytest.LogCaptureFixture) -> None:
    """After the context turned round the old mean would take a dozen calls to move; it is let go instead."""
    book, stubborn = OffsetBook(FINGERPRINT, MeanOffset()), OffsetStatistics(LAYERS, HEADS, DIM)
    before = [seen(n, 1.0) for n in range(12)]
    for observation in [*before, *(seen(20 + n, 1.0, OTHER) for n in range(6))]:
        book.learn([observation])
    assert not book.drifts[PAIR].aged and not book.drifts[PAIR].dropped
    with caplog.at_level(logging.INFO):
        for n in range(6):
            book.learn([seen(40 + n, -1.0)])
    assert book.drifts[PAIR].dropped == 1 and "dropped" in caplog.text
    assert not book.drifts[OTHER].dropped
    base = random_kv(6, 99)
    found = book.predictor().predict(PAIR, base)  # type: ignore[union-attr]
    for observation in [*before, *(seen(40 + n, -1.0) for n in range(6))]:
        stubborn.observe(observation.pair, observation.base, observation.true)
    old = MeanOffset().solve(stubborn).predict(PAIR, base)  # type: ignore[union-attr]
    assert found is not None and old is not None
    assert float((found + 1).square().mean()) < 0.1 < float((old + 1).square().mean())


def test_probes_alone_show_it() -> None:
    book = OffsetBook(FINGERPRINT, MeanOffset())
    book.learn([seen(n, 1.0) for n in range(8)])
    calls = book.calls("critic/task")
    for ratio in (1.0, 1.1, 0.9, 1.0, 3.5, 3.5):
        book.notice({PAIR: ratio})
    assert book.drifts[PAIR].aged >= 1 and book.calls("critic/task") < calls
    for _ in range(3):
        book.notice({PAIR: 60.0})
    assert book.calls("critic/task") == 0 and PAIR not in book.gains


def test_ageing_keeps_means_and_what_the_shared_map_learned() -> None:
    """Centred sums, out of which the map is solved, are the same before and after."""
    statistics = OffsetStatistics(LAYERS, HEADS, DIM)
    for n in range(6):
        one = seen(n, 1.0)
        statistics.observe(one.pair, one.base, one.true)
    sums = statistics.pairs[PAIR]

    def centred() -> torch.Tensor:
        x, y = (part / sums.tokens.clamp_min(1).sqrt()[:, None] for part in (sums.x, sums.y))
        return statistics.xy - x.transpose(2, 3) @ y

    mean, before, tokens = sums.y / sums.tokens[:, None], centred(), sums.tokens.clone()
    statistics.age(PAIR, 0.5)
    torch.testing.assert_close(sums.y / sums.tokens[:, None], mean)
    torch.testing.assert_close(centred(), before)
    torch.testing.assert_close(sums.tokens, tokens / 2)
    statistics.age(PAIR, 0.01)
    torch.testing.assert_close(sums.tokens, torch.ones_like(tokens))  # never less than one
    statistics.drop(PAIR)
    torch.testing.assert_close(statistics.xy, before)
    assert not statistics.pairs


def test_an_aged_mean_moves_faster() -> None:
    slow, fast = (OffsetStatistics(LAYERS, HEADS, DIM) for _ in range(2))
    for n in range(10):
        for statistics in (slow, fast):
            statistics.observe(PAIR, *(lambda o: (o.base, o.true))(seen(n, 1.0)))
    fast.age(PAIR, 0.1)
    new = seen(50, -1.0)
    for statistics in (slow, fast):
        statistics.observe(PAIR, new.base, new.true)
    off = [
        float(s.pairs[PAIR].y.sum() / s.pairs[PAIR].tokens.sum() / s.pairs[PAIR].y[..., 0, :].numel())
        for s in (slow, fast)
    ]
    assert off[1] < off[0]
    assert features(new.base).shape[-1] == WIDTH
