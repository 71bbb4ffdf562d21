"""What a call will take, dense and reused, in seconds on this machine: so that the faster way is taken.

A prefill of n tokens takes a + b n + c n² (overhead, matrices, attention); a pass over m scattered tokens is another
line with the same attention; moving KV takes seconds a byte. All are measured in a second or two on the model
itself, and refined by every real call: a factor for each of the two ways follows measured over predicted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace

from kvcomm.checks import need, shown
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import ModelBackend
from kvcomm.reuse.forecast import Forecast
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.rates import Clock, Rates, measure_rates

log = logging.getLogger(__name__)
_WEIGHT = 0.2  # of one call in the running factors
_FADE = 0.98
_STEP = 2.0  # a call counts as at most so many times slower or faster than predicted: machines pause
_PATIENCE, _MOST_PATIENCE = 8, 64  # calls that are computed for one that tries reuse, at first and at last
_HOPELESS = 4.0  # times as long as computing: not tried
_TRIAL_WEIGHT = 0.5
_FIRST_PER_SEGMENT = 12.0  # tokens recomputed a segment, until calls have shown it


class Costs:
    """Rates of one model on one machine, and how real calls compare with them. Safe to use from several threads.

    Args:
        rates: known beforehand; ``measure`` finds them otherwise.
        clock: seconds that only grow.
    """

    def __init__(self, rates: Rates | None = None, clock: Clock = time.perf_counter) -> None:
        need(rates, (Rates, type(None)), "rates", "pass Rates, or nothing to have them measured")
        if not callable(clock):
            raise InvalidInput(f"clock is {shown(clock)}; pass a function that gives seconds")
        self.rates, self.clock = rates, clock
        self.factors = {"dense": 1.0, "reuse": 1.0}
        self.calls = {"dense": 0, "reuse": 0}
        self._per_segment: dict[str, float] = {}
        self._asked = False
        self._computed, self._patience = 0, _PATIENCE
        self._lock = threading.Lock()

    def known(self, backend: ModelBackend) -> bool:
        """Whether a call can be judged. The first one need not wait for it: as a rule the rates are measured behind its
        answer. Where they were not, the second waits for them."""
        with self._lock:
            asked, self._asked = self._asked, True
        if asked:
            self.measure(backend)
        return self.rates is not None

    def measure(self, backend: ModelBackend) -> Rates:
        """Measure the rates, unless they are known; a second or two."""
        with self._lock:
            if self.rates is None:
                began = self.clock()
                self.rates = measure_rates(backend, self.clock)
                log.info("measured what prefill and reuse cost in %.2f s: %s", self.clock() - began, self.rates)
            return self.rates

    def forecast(self, plan: Plan, policy: str, token_bytes: int) -> Forecast:
        """Both times for a plan before anything is selected; the rates must be known.

        Args:
            policy: a name for how much is selected; its average over past calls is taken.
            token_bytes: bytes of KV of a token.
        """
        if self.rates is None:
            raise InvalidInput("the rates are not known yet; call measure first")
        tokens, head = len(plan.prompt), plan.counts.exact
        segments = sum(part.selectable for part in plan.parts)
        with self._lock:
            selected = self._per_segment.get(policy, _FIRST_PER_SEGMENT) * segments
            dense, reuse = self.factors["dense"], self.factors["reuse"]
        computed = min(len(plan.computed) + selected, tokens - head)
        held = token_bytes * float(plan.counts.exact + plan.counts.approximate + plan.counts.recomputed)
        return Forecast(
            dense * self.rates.dense_s(head, tokens, token_bytes), reuse * self.rates.reuse_s(computed, tokens, held)
        )

    def weigh(self, forecast: Forecast) -> Forecast:
        """The forecast that decides: now and then a call that would be computed tries reuse.

        What is never tried cannot show that its rates were measured in a slow moment. One call in 8 tries at first, one
        in 64 at last, and none where reuse is predicted to take four times as long; a trial that was the faster way is
        followed by another one.
        """
        if not forecast.dense or forecast.reuse_s > _HOPELESS * forecast.dense_s:
            return forecast
        with self._lock:
            self._computed += 1
            if self._computed < self._patience:
                return forecast
            self._computed, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
        return replace(forecast, trial=True)

    def refine(self, way: str, forecast: Forecast, seconds: float) -> None:
        """Learn from a call that went ``dense`` or ``reuse`` and took ``seconds``."""
        predicted = forecast.dense_s if way == "dense" else forecast.reuse_s
        if not predicted > 0 or not seconds > 0:
            return
        ratio = min(max(seconds / predicted, 1 / _STEP), _STEP)
        with self._lock:
            self.factors[way] *= math.exp((_TRIAL_WEIGHT if forecast.trial else _WEIGHT) * math.log(ratio))
            if forecast.trial and seconds < forecast.dense_s:
                self._patience = 1
            other = "reuse" if way == "dense" else "dense"
            self.factors[other] **= _FADE  # what is not tried any more must not be judged by one slow moment for ever
            self.calls[way] += 1

    def selected(self, policy: str, plan: Plan) -> None:
        """Learn how many tokens a policy computes again, the work of choosing and judging with them."""
        segments = sum(part.selectable for part in plan.parts)
        if segments:
            each = (sum(len(part.recompute) for part in plan.parts) + plan.extra_tokens) / segments
            with self._lock:
                before = self._per_segment.get(policy, each)
                self._per_segment[policy] = before + _WEIGHT * (each - before)


class FrozenCosts(Costs):
    """Another engine's costs as they are, which calls do not teach: so that equal calls are decided alike."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs.rates, costs.clock)
        self._costs = costs

    def known(self, backend: ModelBackend) -> bool:
        """True: the first call waits for the rates too. The other engine knows them from then on."""
        self.rates = self._costs.measure(backend)
        return True

    def forecast(self, plan: Plan, policy: str, token_bytes: int) -> Forecast:
        """As Costs.forecast."""
        return self._costs.forecast(plan, policy, token_bytes)

    def weigh(self, forecast: Forecast) -> Forecast:
        """The forecast: nothing is tried."""
        return forecast

    def refine(self, way: str, forecast: Forecast, seconds: float) -> None:
        """Nothing is learned."""

    def selected(self, policy: str, plan: Plan) -> None:
        """Nothing is learned."""
