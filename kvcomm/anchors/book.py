"""The offset book: predicts offsets, tests each prediction against what was observed, and only then learns it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcomm.anchors.drift import Drift
from kvcomm.anchors.gain import Gain
from kvcomm.anchors.offset import LinearOffset, LinearPredictor, OffsetEstimator, Predictor
from kvcomm.anchors.saved import Learned, dump
from kvcomm.anchors.statistics import OffsetStatistics, Pair, check_observation, features
from kvcomm.anchors.variance import OffsetErrors, solve_errors
from kvcomm.errors import InvalidInput
from kvcomm.rope.view import LinearMap
from kvcomm.types import ModelFingerprint, SegmentKV

log = logging.getLogger(__name__)
_AGED = 0.5
_TESTED_CALLS = 2


@dataclass(frozen=True)
class Observation:
    """A base, where it was used, and the KV that a dense run had there; both unrotated, one shape."""

    pair: Pair
    base: SegmentKV
    true: SegmentKV


class OffsetBook:
    """Offsets of one namespace and fingerprint: statistics, an estimator and its running gain.

    Threads may use one book at once. One of them learns at a time; while it solves, the others go on predicting with
    what was solved before.

    Args:
        learned: what to go on from. When it is given, what is learned from then on is also held apart, to be saved.
    """

    def __init__(
        self,
        fingerprint: ModelFingerprint,
        estimator: OffsetEstimator | None = None,
        learned: Learned | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self._learning = threading.RLock()  # held by whoever changes or solves the sums
        self._lock = threading.RLock()  # held for the moment in which the sums and the tests change or are read
        self.estimator: OffsetEstimator = estimator or LinearOffset()
        self._learned = learned if learned is not None else Learned.empty(fingerprint)
        self._fresh = None if learned is None else Learned.empty(fingerprint)
        self._solved: tuple[int, OffsetEstimator, Predictor | None] | None = None
        self._errors: tuple[int, OffsetErrors | None] | None = None
        self.drifts: dict[Pair, Drift] = {}

    def learn(self, observations: Sequence[Observation]) -> None:
        """Test the present predictor on all observations, then add them.

        Raises:
            InvalidInput: a base and its true KV differ in shape or hold NaN or infinity; nothing was learned.
        """
        for seen in observations:
            check_observation(seen.base, seen.true)
        if not observations:
            return
        with self._learning:
            predictor = self.predictor()
            self._test(observations)
            new = Learned.empty(self.fingerprint)
            for seen in observations:
                predicted = predictor.predict(seen.pair, seen.base) if predictor else None
                new.statistics.observe(seen.pair, seen.base, seen.true)
                if predicted is not None:
                    gain = new.gains.setdefault(seen.pair, Gain(self.statistics.layers))
                    gain.test(predicted, features(seen.true).float() - features(seen.base).float())
            with self._lock:
                self._learned.merge(new)
                if self._fresh is not None:
                    self._fresh.merge(new)
            self.solve()

    def notice(self, ratios: Mapping[Pair, float]) -> None:
        """Take in how far estimates were off in one call, over what was expected; what no longer holds is let go.

        Where the errors at a pair of places have risen well above what they were, its contexts have changed: what was
        learned of it counts half, or is dropped, and is learned anew (kvcomm.anchors.drift). What was saved before
        stays as it was saved.
        """
        with self._learning:
            for pair, ratio in ratios.items():
                if pair not in self.statistics.pairs:
                    continue
                drift = self.drifts.setdefault(pair, Drift())
                rise, verdict = drift.rise, drift.see(ratio)
                if verdict == "steady":
                    continue
                with self._lock:
                    for learned in filter(None, (self._learned, self._fresh)):
                        learned.age(pair, _AGED if verdict == "aged" else 0.0)
                log.info("%s: errors have risen to %.1f times what they were; %s", pair, max(rise, drift.rise), verdict)

    def _test(self, observations: Sequence[Observation]) -> None:
        """Notice the errors that estimates would have had over whole segments."""
        table = self.errors()
        if table is None:
            return
        found: dict[Pair, tuple[float, float]] = {}
        for seen in observations:
            sums = self.statistics.pairs.get(seen.pair)
            if sums is None or not len(seen.base) or float(sums.calls.max()) < _TESTED_CALLS:
                continue  # from one or two calls nobody knows what to expect
            estimate = self.estimate(seen.pair, seen.base)
            off = features(seen.true).double() - features(seen.base).double()
            if estimate is not None:
                off = off - features(estimate).double()
            squares = [half.square().sum(1) for half in (*off.chunk(2, -1), *features(seen.true).double().chunk(2, -1))]
            keys, values, unit_k, unit_v = (part.sum((1, 2)) for part in squares)
            tokens = len(seen.base)
            error = (keys / unit_k.clamp_min(1e-30) + values / unit_v.clamp_min(1e-30)).mean() / 2 * tokens
            before = found.get(seen.pair, (0.0, 0.0))
            expected = float(table.expect(seen.pair, tokens).sum())
            found[seen.pair] = before[0] + float(error), before[1] + expected
        self.notice({pair: error / max(expected, 1e-12) for pair, (error, expected) in found.items()})

    def solve(self) -> None:
        """Solve for what was learned so far, so that the next call's first token does not wait for it."""
        self.predictor()
        self.errors()

    def forget(self, which: Callable[[str], bool]) -> int:
        """Drop the means and tests of every pair captured or used at a label that ``which`` chooses.

        What they taught the map that all pairs share stays in its sums: those add, and cannot be taken apart. ``clear``
        drops them all.

        Returns:
            how many pairs there were.
        """
        with self._learning, self._lock:
            gone = self._learned.forget(which)
            if self._fresh is not None:
                self._fresh.forget(which)
        return gone

    def clear(self) -> int:
        """Drop everything learned, the shared sums with it; returns how many pairs there were."""
        with self._learning, self._lock:
            gone = len(self.statistics.pairs)
            version = self.statistics.version
            self._learned = Learned.empty(self.fingerprint)
            self._learned.statistics.version = version + 1
            if self._fresh is not None:
                self._fresh = Learned.empty(self.fingerprint)
        return gone

    def dump(self) -> bytes:
        """Everything learned as bytes (kvcomm.anchors.saved)."""
        with self._learning:
            return dump(self._learned)

    def take(self, learned: Learned) -> None:
        """Go on from what was learned elsewhere.

        Raises:
            InvalidInput: something was learned here already: the same observations must not be added twice.
        """
        with self._learning, self._lock:
            if self.statistics.pairs:
                raise InvalidInput(
                    f"offsets of {len(self.statistics.pairs)} pairs of places were learned here already, and what is "
                    "loaded may hold the same observations; load into a new engine, or forget its namespace first"
                )
            version = self.statistics.version
            self._learned = learned
            learned.statistics.version = version + 1

    def replace(self, total: Learned) -> None:
        """Go on from ``total``, to which is added what was learned here since ``take_fresh``; the book keeps it.

        Raises:
            InvalidInput: the book does not hold apart what it learns.
        """
        with self._learning, self._lock:
            if self._fresh is None:
                raise InvalidInput("the book does not hold apart what it learns; make it with OffsetBook(learned=...)")
            total.merge(self._fresh)
            total.statistics.version = self.statistics.version + 1
            self._learned = total

    @property
    def statistics(self) -> OffsetStatistics:
        """The sums."""
        return self._learned.statistics

    @property
    def gains(self) -> dict[Pair, Gain]:
        """The running tests by pair."""
        return self._learned.gains

    def take_fresh(self) -> Learned | None:
        """What was learned since this was last called, for the caller to save; None if nothing was, or none is held."""
        with self._lock:
            fresh = self._fresh
            if fresh is None or not fresh.statistics.pairs:
                return None
            self._fresh = Learned.empty(self.fingerprint)
            return fresh

    def put_back(self, fresh: Learned) -> None:
        """Hold ``fresh``, which could not be saved, for the next time."""
        with self._lock:
            if self._fresh is not None:
                self._fresh.merge(fresh)

    def predictor(self) -> Predictor | None:
        """The estimator solved for the present statistics; solved again only when they changed."""
        solved = self._solved
        if solved is not None and solved[:2] == (self.statistics.version, self.estimator):
            return solved[2]
        if not self._learning.acquire(blocking=solved is None):
            return solved[2] if solved is not None else None  # another thread is learning: go on with the one before
        try:
            version, estimator = self.statistics.version, self.estimator
            if self._solved is None or self._solved[:2] != (version, estimator):
                self._solved = (version, estimator, estimator.solve(self.statistics))
            return self._solved[2]
        finally:
            self._learning.release()

    def estimate(self, pair: Pair, base: SegmentKV) -> SegmentKV | None:
        """Shrunk offset of ``base`` used at ``pair.used``, or None where none would help.

        A pair that was never tested takes the gain over all pairs together.

        Returns:
            offset in the base's shape and dtype, unrotated; layer 0 is zero.
        """
        predictor, factor = self.predictor(), self._useful(pair, base)
        offset = predictor.predict(pair, base) if predictor is not None and factor is not None else None
        if offset is None or factor is None:
            return None
        keys, values = offset.chunk(2, dim=-1)
        scale = factor.to(device=offset.device, dtype=offset.dtype)[:, :, None, None, None]
        return SegmentKV(_with_first(keys * scale[:, 0], base), _with_first(values * scale[:, 1], base))

    def linear(self, pair: Pair, base: SegmentKV) -> LinearMap | None:
        """What ``estimate`` gives as a linear map of the base, not applied yet, or None where it is not one.

        For a splice that applies it while it moves the base, on the base's device.
        """
        predictor, factor = self.predictor(), self._useful(pair, base)
        if not isinstance(predictor, LinearPredictor) or factor is None:
            return None
        return predictor.map(pair, base, factor)

    def errors(self) -> OffsetErrors | None:
        """Expected errors of offsets under the present statistics, or None while nothing was observed."""
        with self._learning:
            version = self.statistics.version
            if self._errors is None or self._errors[0] != version:
                ridge = self.estimator.ridge if isinstance(self.estimator, LinearOffset) else LinearOffset().ridge
                self._errors = (version, solve_errors(self.statistics, ridge))
            return self._errors[1]

    def _useful(self, pair: Pair, base: SegmentKV) -> torch.Tensor | None:
        """Shrinkage [layers - 1, 2] of an offset for ``pair``, or None where it would be all 0 or there is no KV."""
        factor = self._factor(pair) if len(base) and self.statistics.layers else None
        return None if factor is None or float(factor.max()) <= 0 else factor

    def _factor(self, pair: Pair) -> torch.Tensor | None:
        with self._lock:
            gain = self.gains.get(pair)
            if gain is None:
                gain = Gain(self.statistics.layers)
                for other in self.gains.values():
                    gain.add(other)
            return gain.factor if gain.calls else None

    def calls(self, label: str) -> int:
        """How many calls were observed of bases used at ``label``."""
        with self._lock:
            pairs = [sums for pair, sums in self.statistics.pairs.items() if pair.used == label]
            return int(sum(float(sums.calls.max()) for sums in pairs if len(sums.calls)))

    def explained(self, pair: Pair) -> float:
        """Share of the squared offset that predictions for ``pair`` explained so far; 0 if never tested."""
        with self._lock:
            gain = self.gains.get(pair)
            return gain.explained if gain else 0.0


def _with_first(later: torch.Tensor, base: SegmentKV) -> torch.Tensor:
    out = torch.zeros_like(base.keys)
    out[1:] = later
    return out
