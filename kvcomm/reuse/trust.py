"""How close a call will be, predicted before its first token, and more computed where that is not close enough.

Tokens that are computed again anyway are probes: their fresh KV against the spliced KV shows how far the table of
expected errors (kvcomm.anchors.variance) is off in this call and this segment. The selected ones are where errors are
expected to be largest, so a few at random inside each segment join them. The same pass watches what the closing request
attends to. A calibration (kvcomm.reuse.calibration) makes a predicted KL of it.

Above the policy's bound more of the segment that contributes most is computed, half of what is left of it at a time and
then all of it. The pass that does so begins at the first added token and runs everything chosen behind it once more, so
that the cache is the one that a single pass over all of them would have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean

import torch

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.statistics import Pair
from kvcomm.errors import UnsupportedModel
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.calibration import Calibration
from kvcomm.reuse.evidence import Evidence, Spliced, features, gather, random_probes, ratios
from kvcomm.reuse.judgement import Features, Judgement, PartJudgement
from kvcomm.reuse.plan import Plan

MOST_PASSES = 3
_LEAST_ADDED = 8  # tokens; a rest of no more is computed with them


@dataclass(frozen=True)
class Trust:
    """A bound on the KL, and what predicts it.

    Attributes:
        max_kl: mean KL in nats that is accepted.
        confidence: the share of calls that shall stay below it.
    """

    max_kl: float
    confidence: float
    calibration: Calibration

    def probing(self, plan: Plan) -> Plan:
        """The plan with a few random tokens of each segment computed again besides."""
        probes = [p for part in plan.parts if part.selectable for p in random_probes(part)]
        return plan.recomputing([*plan.computed, *probes], plan.extra_tokens)

    def run(self, backend: ModelBackend, plan: Plan, buffer: KVBuffer, book: OffsetBook) -> Plan:
        """Compute what the plan chose, judge, and compute more until the bound holds.

        Args:
            buffer: everything held is spliced; its length is the prompt's. All that is chosen is computed in it, the
                prompt's last token too.

        Returns:
            the plan as it was carried out, with its judgement.
        """
        evidence = gather(plan, book)
        if self._bound(plan, evidence, self.calibration.margin(0.5)) > self.max_kl:
            plan = self._more(plan, evidence, self.calibration.margin(0.5))  # clear without a look: spares a pass
        added = {e.index: 0 for e in evidence}
        run: Sequence[int] = plan.computed
        passes, extra = 0, plan.extra_tokens + 1  # the last token is computed again by whoever generates
        while True:
            evidence = _pass(backend, plan, buffer, evidence, run)
            passes += 1
            if passes == MOST_PASSES or self._bound(plan, evidence) <= self.max_kl:
                break
            fuller = self._more(plan, evidence, self.calibration.margin(self.confidence))
            before = {*plan.computed}
            new = [p for p in fuller.computed if p not in before]
            for e in evidence:
                added[e.index] += len({*new} & {*e.positions.tolist()})
            run = [p for p in fuller.computed if p >= new[0]]
            extra += len(run) - len(new)
            plan = fuller
        judgement = self._judgement(plan, evidence, added, passes, self.calibration.serves(backend.spec.fingerprint))
        return replace(plan, judgement=judgement, extra_tokens=extra)

    def _features(self, plan: Plan, evidence: Sequence[Evidence]) -> list[Features]:
        tokens = len(plan.prompt)
        return [features(e, ratio, tokens, e.left(plan)) for e, ratio in zip(evidence, ratios(evidence), strict=True)]

    def _bound(self, plan: Plan, evidence: Sequence[Evidence], margin: float | None = None) -> float:
        total = reduce(add, self._features(plan, evidence), Features())
        return self.calibration.predict(total) * (margin or self.calibration.margin(self.confidence))

    def _more(self, plan: Plan, evidence: Sequence[Evidence], margin: float) -> Plan:
        """The plan with more computed, segment by segment, until the prediction times ``margin`` would be accepted."""
        tokens, found = len(plan.prompt), ratios(evidence)
        left = [e.left(plan) for e in evidence]
        while True:
            each = [features(e, r, tokens, keep) for e, r, keep in zip(evidence, found, left, strict=True)]
            total = reduce(add, each, Features())
            if total.none or self.calibration.predict(total) * margin <= self.max_kl:
                break
            open_ = [n for n in zip(evidence, left, each, strict=True) if n[1].any()]
            if not open_:
                break
            _halve(*max(open_, key=lambda n: self.calibration.predict(n[2]))[:2])
        chosen = [p for e, keep in zip(evidence, left, strict=True) for p in e.positions[~keep].tolist()]
        return plan.recomputing(chosen, plan.extra_tokens)

    def _judgement(
        self, plan: Plan, evidence: Sequence[Evidence], added: dict[int, int], passes: int, calibrated: bool
    ) -> Judgement:
        parts: list[PartJudgement | None] = [None] * len(plan.parts)
        each = self._features(plan, evidence)
        for e, ratio, own in zip(evidence, ratios(evidence), each, strict=True):
            kl = self.calibration.predict(own)
            parts[e.index] = PartJudgement(kl, int((~e.observed.isnan()).sum()), ratio, added[e.index])
        total = reduce(add, each, Features())
        kl = self.calibration.predict(total)
        return Judgement(
            kl,
            kl * self.calibration.margin(self.confidence),
            self.max_kl,
            self.confidence,
            calibrated,
            total,
            passes,
            tuple(parts),
        )


def ratios_by_pair(plan: Plan) -> dict[Pair, float]:
    """Of a judged plan, each pair of places' observed over expected error, averaged where it occurs twice."""
    found: dict[Pair, list[float]] = {}
    for part, judged in zip(plan.parts, plan.judgement.parts if plan.judgement else (), strict=False):
        if judged is not None and judged.probes and part.pair is not None:
            found.setdefault(part.pair, []).append(judged.ratio)
    return {pair: fmean(ratios) for pair, ratios in found.items()}


def _halve(e: Evidence, left: torch.Tensor) -> None:
    """Take the half of the tokens left that contributes most off ``left``, or all of them where few are."""
    count = int(left.sum())
    take = count if count <= 2 * _LEAST_ADDED else count // 2
    worth = (e.expected * (e.attended / e.attended.mean().clamp_min(1e-30) + 1.0)).where(left, -1.0)
    left[torch.sort(worth, descending=True, stable=True).indices[:take]] = False


def _pass(
    backend: ModelBackend, plan: Plan, buffer: KVBuffer, evidence: Sequence[Evidence], run: Sequence[int]
) -> list[Evidence]:
    """Compute ``run``; what it shows of the spliced KV that it wrote over, and of attention."""
    running = {*run}
    spliced = Spliced(buffer, [p for e in evidence for p in e.positions[e.observed.isnan()].tolist() if p in running])
    closing = next(part for part in reversed(plan.parts) if part.start < part.stop)
    queries = [p for p in run if p >= closing.start]
    ids = [plan.prompt.token_ids[p] for p in run]
    try:
        seen = backend.attended(buffer, ids, run, queries).double().cpu()
        attended, first = seen.mean(0), seen[-1]
    except UnsupportedModel:
        backend.forward(buffer, ids, run, logits=0)
        attended = first = torch.full((len(plan.prompt),), 1.0 / len(plan.prompt), dtype=torch.float64)
    observed = dict(zip(spliced.positions, spliced.errors(buffer).tolist(), strict=True))
    updated = []
    for e in evidence:
        now = e.observed.clone()
        for n, p in enumerate(e.positions.tolist()):
            if p in observed:
                now[n] = observed[p]
        updated.append(replace(e, observed=now, attended=attended[e.positions], first=first[e.positions]))
    return updated
