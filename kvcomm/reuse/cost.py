"""What a call will take, dense and reused, in seconds on this machine: so that reuse is never the slower of the two.

A prefill of n tokens takes a + b n + c n² (overhead, matrices, attention); a pass over m scattered tokens is another
line with the same attention; moving KV takes seconds a byte. All are measured in about a second on the model itself,
and refined by every real call: a factor for each of the two ways follows measured over predicted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcomm.checks import need, need_all, shown
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.forecast import Forecast
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.splice import cut, splice

log = logging.getLogger(__name__)
Clock = Callable[[], float]
LARGEST_RATE_S = 1e6  # of anything that a rate stands for
_PREFILLS = (32, 128, 384)
_PASSES = (8, 64)
_WEIGHT = 0.2  # of one call in the running factors
_FADE = 0.98
_STEP = 2.0  # a call counts as at most so many times slower or faster than predicted: machines pause
_FIRST_PER_SEGMENT = 12.0  # tokens recomputed a segment, until calls have shown it


@dataclass(frozen=True)
class Rates:
    """Seconds: overhead, a token and a pair of tokens of a prefill; the same of a pass; a byte moved.

    Raises:
        InvalidInput: there are not as many, or one is no finite number of 0 or more.
    """

    prefill: tuple[float, float, float]
    recompute: tuple[float, float]
    byte: float

    def __post_init__(self) -> None:
        for name, several, count in (("prefill", self.prefill, 3), ("recompute", self.recompute, 2)):
            need_all(several, (int, float), name, f"give {count} numbers of seconds")
            if len(several) != count:
                raise InvalidInput(f"{name} has {len(several)} rates; give {count} numbers of seconds")
        need(self.byte, (int, float), "byte", "give seconds a byte")
        for seconds in (*self.prefill, *self.recompute, self.byte):
            if not 0.0 <= seconds <= LARGEST_RATE_S:
                raise InvalidInput(f"a rate is {seconds}; give seconds from 0 to {LARGEST_RATE_S:g}")

    def dense_s(self, head: int, tokens: int, byte: float) -> float:
        """Of computing a prompt of ``tokens`` behind an exact head, of ``byte`` bytes a token, that is moved."""
        a, b, c = self.prefill
        return a + b * (tokens - head) + c * (tokens**2 - head**2) + self.byte * byte * head

    def reuse_s(self, recomputed: float, tokens: int, moved_bytes: float) -> float:
        """Of moving what is held and running so many tokens, spread over a prompt of ``tokens``, and its last one."""
        a, b = self.recompute
        return a + (b + self.prefill[2] * tokens) * recomputed + self.byte * moved_bytes + self.step_s

    @property
    def step_s(self) -> float:
        """Of one token."""
        return self.prefill[0] + self.prefill[1]


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
        """Measure the rates, unless they are known; about a second, and less than ten passes of the model."""
        with self._lock:
            if self.rates is None:
                began = self.clock()
                self.rates = _measure(backend, self.clock)
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

    def refine(self, way: str, forecast: Forecast, seconds: float) -> None:
        """Learn from a call that went ``dense`` or ``reuse`` and took ``seconds``."""
        predicted = forecast.dense_s if way == "dense" else forecast.reuse_s
        if not predicted > 0 or not seconds > 0:
            return
        ratio = min(max(seconds / predicted, 1 / _STEP), _STEP)
        with self._lock:
            self.factors[way] *= math.exp(_WEIGHT * math.log(ratio))
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

    def refine(self, way: str, forecast: Forecast, seconds: float) -> None:
        """Nothing is learned."""

    def selected(self, policy: str, plan: Plan) -> None:
        """Nothing is learned."""


@torch.inference_mode()
def _measure(backend: ModelBackend, clock: Clock) -> Rates:
    spec = backend.spec
    sizes = [n for n in _PREFILLS if n <= spec.max_positions] or [spec.max_positions]
    ids = [(7 * n + 1) % spec.vocab_size for n in range(sizes[-1])]

    def timed(work: Callable[[], object]) -> float:
        before = clock()
        work()
        if spec.device.type == "cuda":
            torch.cuda.synchronize(spec.device)
        return max(clock() - before, 0.0)

    def prefill(tokens: int) -> KVBuffer:
        buffer = backend.buffer(tokens)
        backend.forward(buffer, ids[:tokens], range(tokens), 1)
        return buffer

    prefill(sizes[0])  # what is made at the first pass is not the rate
    dense = [timed(lambda n=n: prefill(n)) for n in sizes]  # type: ignore[misc]
    whole = prefill(sizes[-1])

    def recompute(tokens: int) -> object:
        at = sorted({(n * sizes[-1]) // tokens for n in range(tokens)})
        return backend.forward(whole, [ids[p] for p in at], at, 0)

    few = [n for n in _PASSES if n < sizes[-1]] or [1]
    recompute(few[0])
    passes = [timed(lambda n=n: recompute(n)) for n in few]  # type: ignore[misc]
    part = cut(whole, spec, 0, sizes[-1])
    splice(whole, spec, part, 0)
    moved = timed(lambda: splice(whole, spec, part, 0))
    a, b, c = _curve(sizes, dense)
    slope = (passes[-1] - passes[0]) / max(few[-1] - few[0], 1)
    per_token = max(slope - c * sizes[-1], b)  # scattered tokens never cost less than those of a prefill
    return Rates(
        (a, b, c), (max(passes[0] - (per_token + c * sizes[-1]) * few[0], 0.0), per_token), moved / max(part.nbytes, 1)
    )


def _curve(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """a + b n + c n² through the points, none of the three below 0."""
    n, y = np.array(sizes, dtype=float), np.array(seconds)
    for terms in ((0, 1, 2), (0, 1), (1, 2), (1,)):
        if len(terms) > len(n):
            continue
        solved = np.linalg.lstsq(n[:, None] ** np.array(terms), y, rcond=None)[0]
        if (solved >= 0).all():
            found = dict(zip(terms, map(float, solved), strict=True))
            return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)
    return 0.0, float(y[-1] / n[-1]), 0.0
