"""What is predicted rises with the error, and what is computed for the bound leaves the cache that one pass would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcomm.anchors.book import OffsetBook
from kvcomm.errors import UnsupportedModel
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.calibration import Calibration
from kvcomm.reuse.evidence import Spliced, gather, random_probes, ratios
from kvcomm.reuse.judgement import Judgement
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Reuse
from kvcomm.reuse.run import Estimates, prepare
from kvcomm.reuse.select import Leading
from tests.reuse.scene import Case, backend_of, error, make_case, state_error, state_of

LAW = Calibration(0.0, (1.0, 0.5, 0.5), (1.0, 1.5, 2.0, 3.0), samples=100)
LENGTHS = (6, 40, 5, 30, 4)


def case(seed: int = 0) -> Case:
    return make_case(backend_of("llama"), LENGTHS, (9, 12), seed)


def book() -> OffsetBook:
    return OffsetBook(backend_of("llama").spec.fingerprint)


def carried(made: Case, max_kl: float | None, learned: Any = None, k: int = 2) -> tuple[Plan, KVBuffer]:
    policy = Reuse(select=Leading(k), dense_above=1.0, max_kl=max_kl)
    return prepare(made.backend, made.plan, policy, learned or book(), 0, Estimates(LAW))


def judged(plan: Plan) -> Judgement:
    assert plan.judgement is not None
    return plan.judgement


def finish(made: Case, buffer: KVBuffer) -> torch.Tensor:
    start = buffer.length
    return made.backend.forward(buffer, made.ids[start:], range(start, len(made.ids)), logits=1)[-1]


def test_without_a_bound_nothing_is_judged() -> None:
    plan, _ = carried(case(), None)
    assert plan.judgement is None and plan.counts.recomputed == 4


def test_a_bound_that_holds_costs_one_pass_and_a_few_probes() -> None:
    made = case()
    plan, buffer = carried(made, 1e6)
    found = judged(plan)
    assert (found.passes, found.added) == (1, 0) and found.kl > 0
    assert plan.counts.recomputed == 4 + 2 + 2  # two random probes in each segment
    assert [p.probes if p else None for p in found.parts] == [None, 4, None, 4, None]
    again, same = carried(made, 1e6)
    assert again.computed == plan.computed and judged(again) == found
    # The judged pass leaves the cache that an ordinary one would
    chosen = [p for part in plan.parts for p in part.recompute]
    other, logits, _ = made.run(book(), chosen)
    assert error(finish(made, buffer), logits) < 2e-5
    assert state_error(state_of(buffer, len(made.ids)), state_of(other, len(made.ids))) < 2e-5


def test_a_bound_that_cannot_hold_makes_the_call_dense() -> None:
    made = case()
    plan, buffer = carried(made, 1e-9)
    found = judged(plan)
    assert found.features.none and found.kl == 0.0 and plan.counts.approximate == 0
    assert error(finish(made, buffer), made.logits[-1]) < 2e-5
    assert plan.exact_until == len(made.ids)


def between(made: Case) -> float:
    """A bound that the first look does not keep and something short of a prefill does."""
    return judged(carried(made, 1e6)[0]).kl * LAW.margin(0.9) / 2


def test_more_is_computed_as_one_pass_would_have() -> None:
    made = case()
    plan, buffer = carried(made, between(made))
    found = judged(plan)
    assert found.added > 0 and plan.counts.approximate > 0
    assert found.passes == 2 and found.bound <= found.max_kl
    # Tokens computed twice are paid for, the prompt's last one among them
    assert plan.extra_tokens >= 1
    chosen = [p for part in plan.parts for p in part.recompute]
    other, logits, _ = made.run(book(), chosen)
    assert error(finish(made, buffer), logits) < 2e-5


def test_the_decision_is_by_segment() -> None:
    """A segment whose offsets are known exactly is left alone when another, which moved plainly, breaks the bound."""
    made = case()
    only = replace(made.plan.parts[3], pair=None)
    made = replace(made, plan=replace(made.plan, parts=(*made.plan.parts[:3], only, made.plan.parts[4])))
    offsets = made.offsets()
    easy = judged(carried(made, 1e6, offsets)[0])
    assert easy.parts[1] is not None and easy.parts[3] is not None
    assert easy.parts[1].ratio < easy.parts[3].ratio
    worse = easy.kl * LAW.margin(0.9) / 1.3
    found = judged(carried(made, worse, offsets)[0])
    assert found.parts[1] is not None and found.parts[3] is not None
    assert found.parts[3].added > 0 and found.parts[1].added == 0


def test_predictions_rise_with_the_error() -> None:
    made = case()
    right, wrong = (judged(carried(made, 1e6, known)[0]).kl for known in (made.offsets(), book()))
    assert right < wrong
    fewer, more = (judged(carried(made, 1e6, k=k)[0]).kl for k in (12, 2))
    assert fewer < more


def test_observed_error_by_hand() -> None:
    backend = backend_of("llama")
    made = case()
    buffer = made.run(book(), ())[0]
    at = [7, 9, 30]
    spliced = Spliced(buffer, at)
    before = (buffer.keys.clone(), buffer.values.clone())
    generator = torch.Generator().manual_seed(3)
    for part in (buffer.keys, buffer.values):
        part[:, :, at] += torch.randn(part[:, :, at].shape, generator=generator)
    want = []
    for n, p in enumerate(at):
        shares = []
        for layer in range(1, backend.spec.fingerprint.n_layers):
            for old, new in zip(before, (buffer.keys, buffer.values), strict=True):
                unit = new[layer][:, at].square().sum((0, 2)).mean()
                shares.append(float((new - old)[layer, :, p].square().sum() / unit))
        want.append(sum(shares) / len(shares))
        assert spliced.positions[n] == p
    assert spliced.errors(buffer).tolist() == pytest.approx(want, rel=1e-5)


def test_ratios_without_probes_are_one() -> None:
    assert ratios(gather(case().plan, book())) == pytest.approx([1.0, 1.0])


def test_random_probes_hang_on_text_and_place_alone() -> None:
    part = case().plan.parts[1]
    assert random_probes(part) == random_probes(case().plan.parts[1])
    assert random_probes(part) != random_probes(case(1).plan.parts[1])
    assert random_probes(replace(part, recompute=tuple(range(part.start, part.stop - 4)))) == set()


class Unwatchable:
    """A backend whose attention cannot be seen."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attended(self, buffer: KVBuffer, ids: Sequence[int], at: Sequence[int], queries: Sequence[int]) -> torch.Tensor:
        raise UnsupportedModel("attention cannot be watched")


def test_without_attention_it_is_taken_as_even() -> None:
    made = case()
    plan, buffer = carried(replace(made, backend=Unwatchable(made.backend)), 1e6)  # type: ignore[arg-type]
    assert judged(plan).features.attended == pytest.approx(judged(plan).features.spread)
    assert error(finish(made, buffer), finish(made, carried(made, 1e6)[1])) < 2e-5


def test_the_plan_says_it() -> None:
    plan, _ = carried(case(), 1e6)
    assert "predicted KL" in str(plan) and "90% below" in str(plan) and "cautious" not in str(plan)
    policy = Reuse(select=Leading(2), dense_above=1.0, max_kl=1e6)
    plan, _ = prepare(case().backend, case().plan, policy, book(), 0)
    assert "not calibrated for this model" in str(plan)


@pytest.mark.parametrize("value", [1e18, 1e30, 3e38])
def test_kv_so_far_off_that_its_square_is_infinite_is_computed(value: float) -> None:
    """A base may hold any finite number. Its error is then none, and so is the attention that it receives."""
    made = case()
    for part in (made.plan.parts[1], made.plan.parts[3]):
        assert part.base is not None
        part.base.kv.keys.fill_(value)
        part.base.kv.values.fill_(-value)
    plan, buffer = carried(made, 0.05)
    assert judged(plan).features.none and plan.counts.approximate == 0
    assert error(finish(made, buffer), made.logits[-1]) < 2e-5


@pytest.mark.parametrize("power", [1e3, 1e12])
def test_a_law_that_tells_no_segments_apart_ends_too(power: float) -> None:
    """All predictions of a segment are 0, or all are beyond: the one that was computed first is not chosen for ever."""
    made = case()
    for intercept in (1e14, -1e14, 0.0):
        law = Calibration(intercept, (power, power, power), (1.0, 1.0, 1.0, 1.0), samples=100)
        policy = Reuse(select=Leading(2), dense_above=1.0, max_kl=1e-9)
        plan, _ = prepare(made.backend, made.plan, policy, book(), 0, Estimates(law))
        assert judged(plan).features.none or judged(plan).kl <= 1e-9


def test_another_models_law_is_not_called_calibrated() -> None:
    made = case()
    policy = Reuse(select=Leading(2), dense_above=1.0, max_kl=1e6)
    told = [
        judged(prepare(made.backend, made.plan, policy, book(), 0, Estimates(replace(LAW, weights=of)))[0]).calibrated
        for of in ((), ("another model",))
    ]
    assert told == [True, False]
