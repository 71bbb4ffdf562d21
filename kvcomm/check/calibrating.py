"""Fitting a model's calibration: the same prompts at several depths of recompute, so that all sizes of error occur."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcomm import Engine
from kvcomm.check.prompts import Example, divided
from kvcomm.check.study import progressing, study
from kvcomm.reuse.calibration import Calibration, fit
from kvcomm.reuse.policy import Balanced
from kvcomm.reuse.select import Leading, PerSegment, PredictedError

_NO_BOUND = 1e9  # judged, and never more computed
DEPTHS = {
    "fast": Balanced(gate=False, max_kl=_NO_BOUND, dense_above=1.0, select=Leading(0)),
    "balanced": Balanced(gate=False, max_kl=_NO_BOUND, dense_above=1.0),
    "deep": Balanced(gate=False, max_kl=_NO_BOUND, dense_above=1.0, select=PerSegment(20, PredictedError())),
}
"""Policies that are judged and not bounded, from nothing recomputed to a third."""


def calibrated(
    name: str, engine: Engine, examples: Sequence[Example], say: Callable[[str], None], tokens: int = 24
) -> tuple[Calibration, list[tuple[float, float]]]:
    """The calibration of the engine's model, and (predicted, measured) KL of what it was fitted on.

    Raises:
        InvalidInput: too few prompts.
    """
    rows = progressing(study(engine, *divided(examples), DEPTHS, tokens), say)
    samples = [(row.judgement.features, row.kl) for row in rows if row.judgement is not None]
    fingerprint = engine.pool.fingerprint
    kinds = ", ".join(dict.fromkeys(example.kind for example in examples))
    found = fit(
        samples,
        weights=(fingerprint.weights,),
        dtype=fingerprint.dtype,
        about=f"{name}; {len(examples)} prompts: {kinds}",
    )
    return found, [(found.predict(features), kl) for features, kl in samples if not features.none]
