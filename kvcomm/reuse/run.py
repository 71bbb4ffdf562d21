"""Carrying a plan out: splice what is held, recompute what was chosen, then keep and learn what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvcomm.anchors.arriving import ArrivalLost, ArrivingKV
from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.anchors.statistics import Pair
from kvcomm.keys import Recipe
from kvcomm.reuse.arriving import Coming, Filling
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.calibration import UNCALIBRATED, Calibration
from kvcomm.reuse.cost import Costs
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Policy, Reuse
from kvcomm.reuse.select import Scene
from kvcomm.reuse.splice import cut, splice
from kvcomm.reuse.trust import Trust
from kvcomm.rope.view import LinearMap
from kvcomm.types import Segment, SegmentKV, digest_tokens


@dataclass(frozen=True)
class Estimates:
    """What calls are judged by before they run; without costs nothing is gated."""

    calibration: Calibration = UNCALIBRATED
    costs: Costs | None = None


def prepare(
    backend: ModelBackend, plan: Plan, policy: Policy, book: OffsetBook, room: int, by: Estimates | None = None
) -> tuple[Plan, KVBuffer]:
    """Splice, select and recompute until all that is left to compute is a run of tokens at the prompt's end.

    Where the policy asks for it, closeness is predicted on the way and more computed (kvcomm.reuse.trust), or all of it
    is computed because that is faster (kvcomm.reuse.cost).

    Returns:
        the plan as it was carried out, and a buffer filled from position 0 to somewhere before the prompt's last
        token, with room for ``room`` tokens after the prompt. Whoever generates computes the rest in its first
        forward: there logits come from.

    Raises:
        ArrivalLost: a base was lost on its way; plan again (kvcomm.reuse.arriving).
    """
    by = by if by is not None else Estimates()
    gated = isinstance(policy, Reuse) and policy.gate and plan.counts.approximate
    costs = by.costs if gated and by.costs is not None and by.costs.known(backend) else None
    started = costs.clock() if costs is not None else 0.0
    if costs is not None:
        plan = _gated(backend, plan, policy, costs)
    buffer = backend.buffer(len(plan.prompt) + room)
    began = time.perf_counter()
    filling = _splice_all(buffer, backend, plan, book)
    held = [p for part in plan.parts if part.base is not None for p in range(part.start, part.stop)]
    plan = plan.spending(time.perf_counter() - began, held)
    computed = False
    if isinstance(policy, Reuse) and plan.counts.approximate:
        buffer.length = len(plan.prompt)
        plan, computed = _choose(backend, plan, policy, buffer, book, by.calibration)
        filling.only(plan)
        if costs is not None:
            costs.selected(repr(policy), plan)
    tail = _tail_start(plan)
    buffer.length = tail
    middle = [p for p in plan.computed if p < tail]
    if middle and not computed:
        began = time.perf_counter()
        backend.forward(buffer, [plan.prompt.token_ids[p] for p in middle], middle, logits=0)
        plan = plan.spending(time.perf_counter() - began, middle)
    buffer.settle()
    if costs is not None and costs.rates is not None and plan.forecast is not None:
        took = costs.clock() - started + costs.rates.step_s
        if plan.counts.approximate:
            costs.refine("reuse", plan.forecast, took)
        elif plan.forecast.dense and tail:  # from position 0 the caller prefills, and knows what that takes
            costs.refine("dense", plan.forecast, took)
    return plan, buffer


def complete(
    backend: ModelBackend, plan: Plan, book: OffsetBook, leaving: Callable[[KVBuffer, int], None]
) -> tuple[Plan, KVBuffer]:
    """Carry out a plan of exact reuse to the prompt's end, and tell ``leaving`` each layer when all of it is there.

    Args:
        leaving: called with the buffer and 0, 1, ... once that layer of it is final, before the next one is computed.
            What it raises ends the pass.

    Raises:
        ArrivalLost: as ``prepare``.
    """
    buffer = backend.buffer(len(plan.prompt))
    _splice_all(buffer, backend, plan, book)
    buffer.length = len(plan.prompt)
    buffer.after_layer = partial(leaving, buffer)
    began, computed = time.perf_counter(), plan.computed
    backend.forward(buffer, [plan.prompt.token_ids[p] for p in computed], computed, logits=0)
    buffer.after_layer = None
    buffer.settle()
    return plan.spending(time.perf_counter() - began, computed), buffer


def _gated(backend: ModelBackend, plan: Plan, policy: Policy, costs: Costs) -> Plan:
    forecast = costs.weigh(costs.forecast(plan, repr(policy), backend.spec.fingerprint.bytes_per_token))
    plan = replace(plan, forecast=forecast)
    return plan.computing("dense: predicted to be faster", "computed, which is faster") if forecast.dense else plan


def _choose(
    backend: ModelBackend, plan: Plan, policy: Reuse, buffer: KVBuffer, book: OffsetBook, calibration: Calibration
) -> tuple[Plan, bool]:
    """What is computed again of what was spliced; and whether it is computed already, to judge it."""
    began = time.perf_counter()
    selected = policy.select.choose(Scene(backend, plan, buffer, book))
    plan = policy.settle(plan.recomputing(selected.positions, selected.extra_tokens))
    plan = plan.spending(time.perf_counter() - began, selected.positions)
    if policy.max_kl is None or not plan.counts.approximate:
        return plan, False
    began = time.perf_counter()
    buffer.settle()  # fresh KV is compared with what was spliced
    trust = Trust(policy.max_kl, policy.confidence, calibration)
    plan = trust.run(backend, trust.probing(plan), buffer, book)
    plan = plan.spending(time.perf_counter() - began, plan.computed)
    settled = policy.settle(plan)
    return settled, settled is plan


def _tail_start(plan: Plan) -> int:
    """Where the generating forward takes over: at the last token, or at the first where nothing is reused.

    A prefill from position 0 needs no mask and is fastest in the model's own attention; behind spliced KV the
    backend's passes are.
    """
    last = len(plan.prompt) - 1
    return 0 if len(plan.computed) == last + 1 else last


def _splice_all(buffer: KVBuffer, backend: ModelBackend, plan: Plan, book: OffsetBook) -> Filling:
    """Write what is held; all else is cleared, so that nobody who gets the buffer sees another request's KV.

    What is on its way is written when a pass comes to it, or at ``buffer.settle``.
    """
    filled = 0
    coming = []
    for part in plan.parts:
        if part.base is not None:
            buffer.clear(filled, part.start)
            kv, offset = part.base.kv, _offset(part.pair, part.base.kv, book)
            if isinstance(kv, ArrivingKV) and not kv.all_here:
                coming.append(Coming(kv, part.start, offset))
            else:
                splice(buffer, backend.spec, kv, part.start, offset)
            filled = part.stop
    buffer.clear(filled, buffer.capacity)
    filling = Filling(buffer, backend.spec, coming)
    buffer.before_layer = filling if coming else None
    return filling


def _offset(pair: Pair | None, base: SegmentKV, book: OffsetBook) -> SegmentKV | LinearMap | None:
    """What the context adds; as a map where it is one, so that it is applied while the base is moved."""
    if pair is None:
        return None
    mapped = book.linear(pair, base)
    return mapped if mapped is not None else book.estimate(pair, base)


def keep(pool: BasePool, backend: ModelBackend, buffer: KVBuffer, plan: Plan, every_exact: bool) -> int:
    """Put into the pool what this call computed first; returns how many bases were added.

    A segment's KV is kept when the pool has no base of its content, when it is the prompt's head, or, with
    ``every_exact``, whenever it is exact for this prefix. Of a prompt that grows every part is kept as it stands.
    """
    added = 0
    for index, part in enumerate(plan.parts):
        segment = part.part.segment
        if not len(segment) or part.action == "exact":
            continue
        exact = part.stop <= plan.exact_until
        wanted = (part.action == "new" or exact) and not pool.bases(segment)
        grown = plan.prompt.grows and (exact or not part.settled)
        if wanted or grown or (exact and (index == 0 or every_exact)):
            recipe = Recipe("prompt", part.part.label, plan.prompt.preceding[index], exact)
            added += pool.put(segment, recipe, cut(buffer, backend.spec, part.start, part.stop))
    return added


def keep_reply(pool: BasePool, backend: ModelBackend, buffer: KVBuffer, plan: Plan, reply: Segment, label: str) -> bool:
    """Put an agent's answer, whose KV stands in ``buffer`` behind the prompt, into the pool unless it is held.

    The answer to a prompt that grows is kept as it stands here in any case.
    """
    if not len(reply) or (pool.bases(reply) and not plan.prompt.grows):
        return False
    start = len(plan.prompt)
    exact = plan.exact_until == start
    recipe = Recipe("decode", label, digest_tokens(plan.prompt.token_ids), exact)
    return pool.put(reply, recipe, cut(buffer, backend.spec, start, start + len(reply)))


def observe(
    book: OffsetBook, backend: ModelBackend, buffer: KVBuffer, plan: Plan, pool: BasePool, policy: Policy
) -> int:
    """Learn offsets from the exact KV of a call: each computed part against the base that reuse would have taken.

    A part that was reused and then healed counts as computed.

    Returns:
        how many observations were learned.
    """
    if not isinstance(policy, Reuse):
        return 0
    seen = []
    for index, part in enumerate(plan.parts):
        base = policy.choose(pool.bases(part.part.segment))
        if part.action == "exact" or part.stop > plan.exact_until or base is None:
            continue
        if base.recipe.exact and base.recipe.preceding == plan.prompt.preceding[index]:
            continue
        pair = Pair(base.recipe.origin, base.recipe.context, part.part.label)
        try:
            kv = base.kv.whole() if isinstance(base.kv, ArrivingKV) else base.kv
        except ArrivalLost:
            continue
        seen.append(Observation(pair, kv, cut(buffer, backend.spec, part.start, part.stop)))
    book.learn(seen)
    return len(seen)
