"""Policies: values that say what may be reused and how much of it is computed again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import Base, BasePool
from kvcomm.anchors.statistics import Pair
from kvcomm.checks import need, shown
from kvcomm.errors import InvalidInput
from kvcomm.keys import Origin
from kvcomm.reuse.calibration import check_confidence
from kvcomm.reuse.near import check_near, nearest
from kvcomm.reuse.plan import PartPlan, Plan
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.select import Leading, PerSegment, PredictedError, Product, SegmentError, Selection


class Policy(Protocol):
    """Decides each part's fate from the prompt, the bases held and the offsets learned."""

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        """The plan of one call; reads the pool and changes nothing."""
        ...


def check_policy(policy: Policy) -> None:
    """Raise InvalidInput for what is no policy: a class instead of a value of it, for example."""
    if isinstance(policy, type) or not callable(getattr(policy, "plan", None)):
        raise InvalidInput(f"policy is {shown(policy)}; pass a value such as Exact() or Balanced()")


def _new(part: Part, start: int, why: str) -> PartPlan:
    return PartPlan(part, start, "new", why)


def _exact_base(prompt: Prompt, index: int, pool: BasePool) -> Base | None:
    before = prompt.preceding[index]
    for base in pool.bases(prompt.parts[index].segment):
        if base.recipe.exact and base.recipe.preceding == before:
            return base
    return None


def exact_head(prompt: Prompt, pool: BasePool) -> list[PartPlan]:
    """Plans for the leading parts whose KV is held for the very same tokens from position 0."""
    head: list[PartPlan] = []
    for index, part in enumerate(prompt.parts):
        base = _exact_base(prompt, index, pool) if len(part.segment) else None
        if base is None and len(part.segment):
            break
        head.append(PartPlan(part, prompt.starts[index], "exact", "same tokens from position 0", base))
    return head


def _settled(prompt: Prompt, index: int, pool: BasePool) -> PartPlan | None:
    """The part as an earlier call left it behind the very same tokens, some of them reused approximately there."""
    part, start = prompt.parts[index], prompt.starts[index]
    if not len(part.segment):
        return None
    before = prompt.preceding[index]
    base = next((base for base in pool.bases(part.segment) if base.recipe.preceding == before), None)
    if base is None or base.recipe.origin == "isolated":
        return None
    return PartPlan(part, start, "approximate", "as an earlier call left it here", base, settled=True)


@dataclass(frozen=True)
class Dense:
    """Reuse nothing: a full prefill."""

    why: str = "dense prefill as asked"

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        parts = [_new(part, start, "dense") for part, start in zip(prompt.parts, prompt.starts, strict=True)]
        return Plan(prompt, tuple(parts), self.why)


@dataclass(frozen=True)
class Exact:
    """Reuse only KV computed for the same tokens from position 0; greedy answers equal the dense run's."""

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        head = exact_head(prompt, pool)
        rest = [
            _new(part, start, "not held for this prefix")
            for part, start in zip(prompt.parts[len(head) :], prompt.starts[len(head) :], strict=True)
        ]
        return Plan(prompt, (*head, *rest), f"exact reuse of {len(head)} of {len(prompt.parts)} parts")


@dataclass(frozen=True)
class Reuse:
    """Approximate reuse: bases by preference of origin, offsets, and a selection to recompute.

    Attributes:
        origins: which bases may be used, the preferred first; those named together in one string tuple rank alike.
        offsets: whether learned offsets are added.
        select: tokens to recompute in each approximately reused segment.
        dense_above: when more than this share of the tokens outside the exact head must be computed anyway, all are.
        learn_first: while learning, the first so many calls at a place are computed densely: only they show offsets.
        near: share of tokens that a text of which no base is held must have in common with one of which there is, for
            that one's KV to be reused where the two are equal (kvcomm.reuse.near); 0.8 is sensible, 1 turns it off.
        after_edit: tokens in common that are computed again behind each place where such texts differ.
        max_kl: mean KL in nats from the dense answer that is accepted; above it more is computed (kvcomm.reuse.trust).
            None judges nothing and bounds nothing.
        confidence: the share of calls that shall stay below it, 0.5 to 0.95.
        gate: whether a prompt is computed where that is predicted to be faster (kvcomm.reuse.cost); what a call does
            then depends on the machine's speed.

    Raises:
        InvalidInput: a field is outside what it may be; the message names it.
    """

    origins: tuple[tuple[Origin, ...], ...] = (("prompt", "decode"), ("isolated",))
    offsets: bool = True
    select: Selection = field(default_factory=lambda: Leading(16))
    dense_above: float = 0.7
    learn_first: int = 2
    near: float = 1.0
    after_edit: int = 4
    max_kl: float | None = None
    confidence: float = 0.9
    gate: bool = False

    def __post_init__(self) -> None:
        check_confidence(self.confidence)
        need(self.max_kl, (int, float, type(None)), "max_kl", "give a KL above 0 nats, or None for no bound")
        need(self.gate, bool, "gate", "give True or False")
        if self.max_kl is not None and not self.max_kl > 0:
            raise InvalidInput(f"max_kl is {self.max_kl}; give a KL above 0 nats, or None for no bound")
        check_near(self.near, self.after_edit)
        need(self.dense_above, (int, float), "dense_above", "give a share of 0 to 1")
        need(self.learn_first, int, "learn_first", "give 0 or more calls")
        need(self.offsets, bool, "offsets", "give True or False")
        if isinstance(self.select, type) or not callable(getattr(self.select, "choose", None)):
            raise InvalidInput(
                f"select is {shown(self.select)}; give a selection such as Leading(16) or PredictedError()"
            )
        if not 0.0 <= self.dense_above <= 1.0 or self.learn_first < 0:
            raise InvalidInput(
                f"dense_above is {self.dense_above} and learn_first {self.learn_first}; give a share of 0 to 1 and a "
                "whole number of calls, 0 or more"
            )
        known = {"prompt", "decode", "isolated"}
        named = isinstance(self.origins, tuple) and all(isinstance(alike, tuple) for alike in self.origins)
        if not named or not self.origins or any(origin not in known for alike in self.origins for origin in alike):
            raise InvalidInput(
                f'origins is {self.origins}; give tuples of {sorted(known)}, for example (("prompt", "decode"),)'
            )

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        parts = exact_head(prompt, pool)
        for index in range(len(parts), len(prompt.parts)):
            settled = _settled(prompt, index, pool)
            parts.append(settled or self._part(prompt.parts[index], prompt.starts[index], pool))
        return Plan(prompt, tuple(parts), "reuse")

    def settle(self, plan: Plan) -> Plan:
        """The plan once it is known what would be recomputed: all of it dense where little would be saved."""
        rest = plan.counts.total - plan.counts.exact
        share = 1.0 - plan.reuse_rate
        if not rest or share <= self.dense_above:
            return plan
        why = f"dense: {share:.0%} of the tokens must be computed anyway (limit {self.dense_above:.0%})"
        return plan.computing(why, "computed with the rest")

    def _part(self, part: Part, start: int, pool: BasePool) -> PartPlan:
        if not len(part.segment):
            return PartPlan(part, start, "exact", "empty")
        base = self.choose(pool.bases(part.segment))
        if base is not None:
            return self._held(part, start, base)
        found = nearest(part.segment, pool, self.near, self.choose)
        if found is None:
            return _new(part, start, "no base held for this text")
        held = self._held(part, start, found.base)
        again = tuple(start + n for n in found.match.after_edits(self.after_edit))
        return replace(held, why=f"{found.match}, {held.why}", recompute=again, match=found.match)

    def _held(self, part: Part, start: int, base: Base) -> PartPlan:
        pair = Pair(base.recipe.origin, base.recipe.context, part.label) if self.offsets else None
        where = f"{base.recipe.origin} of {base.recipe.context}" if base.recipe.context else base.recipe.origin
        return PartPlan(part, start, "approximate", f"base from {where}", base, pair)

    def choose(self, bases: list[Base]) -> Base | None:
        """The preferred base: by rank of its origin, then the first put."""
        for alike in self.origins:
            for base in bases:
                if base.recipe.origin in alike:
                    return base
        return None


_FURTHEST_OFF = PerSegment(8, Product(factors=(PredictedError(), SegmentError())))


@dataclass(frozen=True)
class Balanced(Reuse):
    """The default: offsets, and where tokens and their segments are expected to be furthest off, 8 tokens a segment
    recomputed.

    Where a full prefill is predicted to be faster there is one, but for a trial now and then, unless ``gate`` is False.
    With ``max_kl`` what reuse
    costs in closeness is predicted before the first token, and more is computed where it would be too much
    (docs/trust.md).
    """

    gate: bool = True
    select: Selection = _FURTHEST_OFF


@dataclass(frozen=True)
class Fast(Reuse):
    """Offsets, and nothing recomputed but what was never computed. Faster, further from the dense answer."""

    select: Selection = field(default_factory=lambda: Leading(0))
