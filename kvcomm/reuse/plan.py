"""What a call will do with each part of its prompt, why, and how many tokens that makes of each kind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvcomm.anchors.match import Match
from kvcomm.anchors.pool import Base
from kvcomm.anchors.statistics import Pair
from kvcomm.reuse.forecast import Forecast
from kvcomm.reuse.judgement import Judgement
from kvcomm.reuse.prompt import Part, Prompt

Action = Literal["exact", "approximate", "new"]


@dataclass(frozen=True)
class TokenCounts:
    """How the prompt's tokens came by their KV.

    Attributes:
        exact: reused, computed for the same tokens from position 0.
        approximate: reused from a base of another context.
        recomputed: of a reused segment but run through the model again.
        new: never computed before, or without a counterpart in the nearly equal text that a base is of. The prompt's
            last token is always computed and counts as recomputed or new.
    """

    exact: int
    approximate: int
    recomputed: int
    new: int

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return self.exact + self.approximate + self.recomputed + self.new


@dataclass(frozen=True)
class PartPlan:
    """One part's fate.

    Attributes:
        start: position of its first token.
        base: the KV it is spliced from, or None when it is computed.
        pair: the offset that applies, for approximate reuse.
        recompute: positions in the prompt, increasing, that are computed again although a base is held.
        match: for a base made of a nearly equal text's, how the two texts stand to each other.
        settled: the base was computed, approximately, behind the very same tokens: selections leave it alone.
        why: one phrase for people.
    """

    part: Part
    start: int
    action: Action
    why: str
    base: Base | None = None
    pair: Pair | None = None
    recompute: tuple[int, ...] = ()
    match: Match | None = None
    settled: bool = False

    @property
    def selectable(self) -> bool:
        """Whether a selection may choose tokens of it: reused approximately, and not settled by an earlier call."""
        return self.action == "approximate" and not self.settled

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.part.segment)

    @cached_property
    def absent(self) -> Sequence[int]:
        """Positions for which no KV is held, increasing: always computed, and never attended to before that."""
        if self.action == "new":
            return range(self.start, self.stop)
        return tuple(self.start + n for n in self.match.absent) if self.match is not None else ()

    @cached_property
    def computed(self) -> Sequence[int]:
        """Positions that go through the model, increasing."""
        return sorted({*self.absent, *self.recompute}) if self.recompute else self.absent


@dataclass(frozen=True)
class Plan:
    """The plan of one call. Its last token is always computed, so that there are logits to sample from.

    Attributes:
        extra_tokens: work spent on choosing what to recompute, in tokens run through all layers.
        seconds: for each part its share, by tokens, of the time that the splice and the passes over its tokens took;
            host time, and empty before the plan was carried out.
        healed_until: position up to which all was computed once more over exact KV (kvcomm.reuse.healing).
        forecast: both times that were predicted, where the policy asks which is shorter.
        judgement: how close the call is predicted to be to a dense one, where the policy bounds that.
    """

    prompt: Prompt
    parts: tuple[PartPlan, ...]
    why: str
    extra_tokens: float = 0.0
    seconds: tuple[float, ...] = ()
    healed_until: int = 0
    forecast: Forecast | None = None
    judgement: Judgement | None = None

    def spending(self, seconds: float, positions: Sequence[int]) -> Plan:
        """This plan with ``seconds`` spent on computing ``positions`` (increasing), shared out by tokens."""
        shares = [bisect_left(positions, part.stop) - bisect_left(positions, part.start) for part in self.parts]
        total = max(sum(shares), 1)
        spent = self.seconds or (0.0,) * len(self.parts)
        added = (before + seconds * share / total for before, share in zip(spent, shares, strict=True))
        return replace(self, seconds=tuple(added))

    def without_kv(self) -> Plan:
        """This plan for people to keep: its bases' KV is let go of, so that what is evicted or forgotten is gone."""
        return replace(self, parts=tuple(replace(part, base=None) for part in self.parts))

    def computing(self, why: str, each: str) -> Plan:
        """This plan with all that would be reused approximately computed instead, as new."""
        parts = (
            PartPlan(part.part, part.start, "new", each) if part.action == "approximate" else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts), why=why)

    def recomputing(self, positions: Sequence[int], extra_tokens: float) -> Plan:
        """This plan with the given positions of its selectable parts computed again, besides those that are anyway."""
        parts = []
        for part in self.parts:
            if part.selectable:
                within = {p for p in positions if part.start <= p < part.stop}
                part = replace(part, recompute=tuple(sorted((within | {*part.recompute}) - {*part.absent})))
            parts.append(part)
        return replace(self, parts=tuple(parts), extra_tokens=extra_tokens)

    @cached_property
    def computed(self) -> tuple[int, ...]:
        """All positions that go through the model, increasing; the last one of the prompt among them."""
        found = [p for part in self.parts for p in part.computed]
        last = len(self.prompt) - 1
        return tuple(found if found and found[-1] == last else [*found, last])

    @cached_property
    def counts(self) -> TokenCounts:
        """Tokens of each kind."""
        computed = set(self.computed)
        kinds = {"exact": 0, "approximate": 0, "recomputed": 0, "new": 0}
        for part in self.parts:
            absent = set(part.absent)
            for p in range(part.start, part.stop):
                kinds["new" if p in absent else "recomputed" if p in computed else part.action] += 1
        return TokenCounts(**kinds)

    @property
    def reuse_rate(self) -> float:
        """Approximately reused tokens over those that exact reuse would have left to compute; 0 if there are none.

        The work of choosing what to recompute counts against it.
        """
        rest = self.counts.total - self.counts.exact
        return max(self.counts.approximate - self.extra_tokens, 0.0) / rest if rest else 0.0

    @cached_property
    def exact_until(self) -> int:
        """Position up to which every token's KV is exact once the plan has run."""
        for part in self.parts:
            if part.action == "approximate" and len(part.computed) < part.stop - part.start:
                return max(part.start, self.healed_until)
        return len(self.prompt)

    def __str__(self) -> str:
        took = f", {sum(self.seconds):.3f} s" if self.seconds else ""
        lines = [f"{self.counts.total} tokens: {self.why}{took}"]
        lines += [f"  {said}" for said in (self.forecast, self.judgement) if said is not None]
        for n, part in enumerate(self.parts):
            again = f", {len(part.recompute)} recomputed" if part.recompute else ""
            took = f"  {self.seconds[n]:.3f} s" if self.seconds else ""
            own = self.judgement.parts[n] if self.judgement is not None else None
            judged = f"; {own}" if own is not None else ""
            lines.append(
                f"  {part.start:>6}  {len(part.part.segment):>5} tokens{took}  {part.part.label:<24} "
                f"{part.action}{again}: {part.why}{judged}"
            )
        return "\n".join(lines)
