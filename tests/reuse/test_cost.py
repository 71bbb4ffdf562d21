"""Both times by hand; rates out of a clock that is turned by hand; the gate in an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcomm import Balanced, Dense
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.cost import Costs, FrozenCosts
from kvcomm.reuse.forecast import Forecast
from kvcomm.reuse.rates import Rates
from tests.hf.engines import GREEDY, engine_of, two_agents
from tests.reuse.scene import backend_of, make_case

SLOW_PREFILL = Rates((0.0, 1.0, 0.0), (0.0, 1.0), 0.0)
"""A second a token, however it is run: reuse pays."""
SLOW_REUSE = Rates((0.0, 1e-6, 0.0), (10.0, 1.0), 0.0)


class Turned:
    """A clock that stands still but for what ``work`` adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A backend whose passes take a known time on a turned clock."""

    def __init__(self, clock: Turned) -> None:
        self._inner, self._clock = backend_of("llama"), clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, buffer: KVBuffer, ids: Sequence[int], at: Sequence[int], logits: int) -> torch.Tensor:
        scattered = len(at) and at[-1] - at[0] + 1 != len(at)
        self._clock.now += 0.5 + 0.02 * len(at) if scattered else 0.1 + 0.01 * len(at) + 1e-5 * len(at) ** 2
        return self._inner.forward(buffer, ids, at, logits)


def test_rates_are_those_of_the_model() -> None:
    clock = Turned()
    rates = Costs(clock=clock).measure(Timed(clock))  # type: ignore[arg-type]
    assert rates.prefill == pytest.approx((0.1, 0.01, 1e-5), rel=1e-6)
    a, b = rates.recompute
    assert a + (b + 1e-5 * 384) * 8 == pytest.approx(0.5 + 0.02 * 8) and rates.byte == 0.0
    assert a + (b + 1e-5 * 384) * 64 == pytest.approx(0.5 + 0.02 * 64)


def test_they_are_measured_once() -> None:
    clock = Turned()
    costs = Costs(clock=clock)
    first = costs.measure(Timed(clock))  # type: ignore[arg-type]
    before = clock.now
    assert costs.measure(Timed(clock)) is first and clock.now == before  # type: ignore[arg-type]


def test_the_first_call_does_not_wait_for_the_rates_and_the_second_does() -> None:
    clock = Turned()
    costs = Costs(clock=clock)
    assert not costs.known(Timed(clock)) and clock.now == 0.0  # type: ignore[arg-type]
    assert costs.known(Timed(clock)) and clock.now > 0.0  # type: ignore[arg-type]
    assert Costs(SLOW_REUSE).known(Timed(clock))  # type: ignore[arg-type]
    clock, unknown = Turned(), Costs()
    assert FrozenCosts(unknown).known(Timed(clock)) and unknown.rates is not None  # type: ignore[arg-type]


def test_rates_are_measured_behind_the_first_answer() -> None:
    engine = engine_of(policy=Balanced(learn_first=0))
    writer, _ = two_agents(engine)
    assert engine.costs.rates is None
    writer.generate(task="a text", max_new_tokens=2, options=GREEDY)
    assert engine.costs.rates is not None


def test_an_engine_that_learns_nothing_measures_them_when_it_is_made() -> None:
    assert engine_of(policy=Balanced(), learn=False).costs.rates is not None
    assert engine_of(policy=Balanced(gate=False), learn=False).costs.rates is None


def test_both_times_by_hand() -> None:
    rates = Rates((0.1, 0.01, 1e-5), (0.2, 0.02), 1e-3)
    assert rates.dense_s(100, 300, 2.0) == pytest.approx(0.1 + 0.01 * 200 + 1e-5 * (300**2 - 100**2) + 1e-3 * 2 * 100)
    assert rates.reuse_s(20, 300, 50.0) == pytest.approx(0.2 + (0.02 + 1e-5 * 300) * 20 + 0.05 + 0.11)


def test_a_forecast_counts_what_is_selected_and_moved() -> None:
    plan = make_case(backend_of("llama"), (6, 40, 5, 30, 4), (9, 12)).plan
    costs = Costs(SLOW_PREFILL)
    found = costs.forecast(plan, "p", 10)
    assert found.dense_s == 85 and found.reuse_s == 6 + 5 + 4 + 2 * 12 + 1 and not found.dense
    costs.selected("p", replace(plan.recomputing([6, 7, 51], 1.0)))
    assert costs.forecast(plan, "p", 10).reuse_s == 6 + 5 + 4 + 4 + 1
    with pytest.raises(InvalidInput, match="measure"):
        Costs().forecast(plan, "p", 10)


def test_real_calls_correct_the_rates() -> None:
    costs = Costs(SLOW_PREFILL)
    for _ in range(40):
        costs.refine("dense", Forecast(10.0 * costs.factors["dense"], 1.0), 15.0)
    assert costs.factors["dense"] == pytest.approx(1.5, rel=0.01)
    costs.refine("reuse", Forecast(1.0, 1.0), 1000.0)  # a pause of the machine
    assert costs.factors["reuse"] < 1.2
    slow = costs.factors["reuse"]
    for _ in range(100):
        costs.refine("dense", Forecast(10.0, 1.0), 10.0)
    assert 1.0 <= costs.factors["reuse"] < 1 + (slow - 1) / 2  # and is forgotten while nothing is reused


@pytest.mark.parametrize("rates, dense", [(SLOW_PREFILL, False), (SLOW_REUSE, True)], ids=["reuse", "dense"])
def test_the_gate_decides_and_says_so(rates: Rates, dense: bool) -> None:
    policy = Balanced(learn_first=0, dense_above=1.0)
    engine = engine_of(policy=policy, costs=Costs(rates))
    writer, critic = two_agents(engine)
    task = "a long text that both of them are given to read, which is why it is reused"
    draft = writer.generate(task=task, max_new_tokens=8, options=GREEDY)
    reply = critic.generate(task=task, draft=draft, max_new_tokens=2, options=GREEDY)
    assert reply.plan.forecast is not None and reply.plan.forecast.dense is dense
    assert (reply.usage.approximate == 0) is dense
    said = "computed" if dense else "reused"
    assert f"s reused: {said}" in str(reply.plan)
    assert engine.costs.calls["dense" if dense else "reuse"] >= 1
    if dense:
        own = critic.generate(task=task, draft=draft, max_new_tokens=2, options=GREEDY, policy=Dense())
        assert own.token_ids == reply.token_ids


def test_what_is_never_tried_is_tried_now_and_then() -> None:
    costs = Costs(SLOW_PREFILL)
    slower = Forecast(1.0, 2.0)

    def trials(calls: int) -> list[int]:
        return [n for n in range(1, calls + 1) if costs.weigh(slower).trial]

    assert trials(8 + 16 + 32 + 64 + 64) == [8, 24, 56, 120, 184]
    assert not costs.weigh(Forecast(1.0, 4.5)).trial and not costs.weigh(Forecast(1.0, 0.5)).trial
    tried = replace(slower, trial=True)
    assert not tried.dense and "reused, to see what it takes" in str(tried)
    costs.refine("reuse", tried, 3.0)
    assert trials(63) == []  # it was slower indeed
    costs.refine("reuse", tried, 0.5)
    assert trials(1) == [1]  # it was faster than computing: tried again at once
    frozen = FrozenCosts(costs)
    assert not any(frozen.weigh(slower).trial for _ in range(200))


def test_a_gate_that_starts_with_wrong_rates_finds_the_right_ones() -> None:
    costs = Costs(Rates((0.0, 1.0, 0.0), (0.0, 3.0), 0.0))
    true, decisions = Rates((0.0, 1.0, 0.0), (0.0, 0.5), 0.0), []
    plan = make_case(backend_of("llama"), (6, 40, 5, 30, 4), (9, 12)).plan
    for _ in range(40):
        forecast = costs.weigh(costs.forecast(plan, "p", 10))
        taken = Costs(true).forecast(plan, "p", 10)
        way, seconds = ("dense", taken.dense_s) if forecast.dense else ("reuse", taken.reuse_s)
        costs.refine(way, forecast, seconds)
        decisions.append(forecast.dense)
    assert all(decisions[:7]) and not any(decisions[12:])


def test_computing_behind_an_exact_head_teaches_what_computing_takes() -> None:
    engine = engine_of(policy=Balanced(learn_first=0, dense_above=1.0), costs=Costs(SLOW_REUSE))
    writer, critic = two_agents(engine)
    task = "a long text that both of them are given to read, which is why it is reused"
    draft = writer.generate(task=task, max_new_tokens=8, options=GREEDY)
    critic.generate(task=task, draft="something else", max_new_tokens=2, options=GREEDY)
    before = engine.costs.calls["dense"]
    reply = critic.generate(task=task, draft=draft, max_new_tokens=2, options=GREEDY)
    assert reply.usage.exact > 0 and reply.plan.forecast is not None and reply.plan.forecast.dense
    assert engine.costs.calls["dense"] == before + 1


def test_without_the_field_no_clock_decides() -> None:
    engine = engine_of(policy=Balanced(gate=False, learn_first=0, dense_above=1.0), costs=Costs(SLOW_REUSE))
    writer, critic = two_agents(engine)
    draft = writer.generate(task="a text for both", max_new_tokens=8, options=GREEDY)
    reply = critic.generate(task="a text for both", draft=draft, max_new_tokens=2, options=GREEDY)
    assert reply.plan.forecast is None and reply.usage.approximate > 0


def test_where_nothing_is_learned_calls_teach_no_costs() -> None:
    engine = engine_of(policy=Balanced(learn_first=0, dense_above=1.0), costs=Costs(SLOW_PREFILL))
    writer, _ = two_agents(engine)
    task = "a long text that both of them are given to read, which is why it is reused"
    draft = writer.generate(task=task, max_new_tokens=8, options=GREEDY)
    frozen = engine.fork(learn=False)
    before = dict(engine.costs.factors), dict(engine.costs.calls)
    forecasts = []
    for _ in range(2):
        reply = frozen.agents["critic"].generate(task=task, draft=draft, max_new_tokens=2, options=GREEDY)
        assert reply.usage.approximate > 0
        forecasts.append(reply.plan.forecast)
    assert forecasts[0] == forecasts[1] is not None
    assert (dict(engine.costs.factors), dict(engine.costs.calls)) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300, "1", None, True])
def test_rates_that_are_no_seconds_are_refused(bad: Any) -> None:
    for fields in (((bad, 0.0, 0.0), (0.0, 0.0), 0.0), ((0.0,) * 3, (0.0, bad), 0.0), ((0.0,) * 3, (0.0,) * 2, bad)):
        with pytest.raises(InvalidInput, match="seconds"):
            Rates(*fields)
    with pytest.raises(InvalidInput, match="2 numbers"):
        Rates((0.0,) * 3, (0.0,) * 3, 0.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="rates is"):
        Costs((0.0,) * 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="clock is"):
        Costs(clock=5.0)  # type: ignore[arg-type]
