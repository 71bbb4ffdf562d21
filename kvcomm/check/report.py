"""The answer to one question: is reuse safe on this model and these prompts?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcomm import Engine
from kvcomm.check.prompts import Example, divided
from kvcomm.check.study import Row, progressing, study, summary
from kvcomm.reuse.policy import Balanced, Fast, Policy

BOUNDED = "balanced"


def methods(max_kl: float) -> dict[str, Policy]:
    """What is compared: the default with a bound, without one, and the fastest. No seconds decide anything here."""
    return {
        BOUNDED: Balanced(gate=False, max_kl=max_kl),
        "unbounded": Balanced(gate=False),
        "fast": Fast(),
    }


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        supported: whether KV of this model can be reused correctly; ``reason`` says why not, or how ``ok`` came about.
        ok: whether reuse under ``policy`` keeps the bound: mean KL below it, and no larger share of prompts above it
            than the policy's confidence leaves. False where nothing was reused: that shows nothing.
        policy: the recommended one, as it is written in Python.
        mean_kl, ttft_gain: of that policy; None where nothing was measured.
        yardstick_kl: mean KL of a dense run in bfloat16 from the one in float32: what rounding alone does.
        methods: figures of each method by name, of ``kvcomm.check.study.summary``.
    """

    model: str
    supported: bool
    ok: bool
    reason: str
    max_kl: float
    policy: str = "Exact()"
    mean_kl: float | None = None
    yardstick_kl: float | None = None
    ttft_gain: float | None = None
    calibrated: bool = False
    prompts: int = 0
    methods: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    by_kind: Mapping[str, float] = field(default_factory=dict)
    points: Sequence[tuple[float, float]] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        found = {name: value for name, value in self.__dict__.items() if name != "points"}
        return found | {"predicted_and_measured_kl": [list(point) for point in self.points]}


def check(name: str, engine: Engine, examples: Sequence[Example], max_kl: float, say: Any, tokens: int = 24) -> Report:
    """Measure and judge.

    Args:
        name: the model's, for the report.
        engine: a new one.
        say: gets a line for each row as it comes.
        tokens: of an answer at most.

    Raises:
        InvalidInput: too few prompts.
    """
    compared = methods(max_kl)
    rows = progressing(study(engine, *divided(examples), compared, tokens, timed=list(compared), rounded=True), say)
    found = {method: summary(rows, method, max_kl) for method in compared}
    yardstick = [row for row in rows if row.method == "yardstick"]
    confidence = Balanced().confidence
    # Where a faster method holds too, it is no advice: nothing watches over it, and the bound costs little.
    chosen = BOUNDED
    mine = [row for row in rows if row.method == chosen]
    kept = _holds(found[chosen], max_kl, confidence)
    ok = kept and found[chosen]["reuse"] > 0
    return Report(
        model=name,
        supported=True,
        ok=ok,
        reason=_reason(mine, found[chosen], max_kl, kept),
        max_kl=max_kl,
        policy=f"Balanced(max_kl={max_kl:g})" if ok else "Exact()",
        mean_kl=found[chosen]["mean_kl"],
        yardstick_kl=summary(yardstick, "yardstick", max_kl)["mean_kl"] if yardstick else None,
        ttft_gain=found[chosen].get("ttft_gain"),
        calibrated=engine.calibration.fits(engine.pool.fingerprint),
        prompts=len(mine),
        methods=found,
        by_kind={k: _mean([r.kl for r in mine if r.kind == k]) for k in dict.fromkeys(r.kind for r in mine)},
        points=gained(mine),
    )


def unsupported(name: str, reason: str, max_kl: float) -> Report:
    """Of a model that is refused, or that holds something that cannot be reused."""
    return Report(model=name, supported=False, ok=False, reason=reason, max_kl=max_kl)


def _holds(found: Mapping[str, float], max_kl: float, confidence: float) -> bool:
    return found["mean_kl"] <= max_kl and found["above"] <= 1.0 - confidence + 1e-9


def _reason(rows: Sequence[Row], found: Mapping[str, float], max_kl: float, kept: bool) -> str:
    above = sum(row.kl > max_kl for row in rows)
    measured = f"{above} of {len(rows)} prompts above KL {max_kl:g}, mean {found['mean_kl']:.2g}"
    if not kept:
        return f"{measured}: reuse does not keep the bound; use Exact(), or calibrate the model first"
    if not found["reuse"] > 0:
        return (
            f"nothing was reused under KL {max_kl:g}, so these prompts say nothing about reuse: give longer texts, "
            "allow more KL, or calibrate the model first"
        )
    slower = found.get("ttft_gain", 2.0) <= 1.0
    return f"{measured}; no sooner than dense on prompts this short" if slower else measured


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rows_of(report: Report) -> list[tuple[str, ...]]:
    """The table by method, for terminal and page."""
    shown: list[tuple[str, ...]] = []
    for name, found in report.methods.items():
        gain = f"{found['ttft_gain']:.1f} ×" if "ttft_gain" in found else ""
        shown.append(
            (name, f"{found['mean_kl']:.4f}", f"{found['largest_kl']:.4f}", f"{found['above']:.0%}",
             f"{found['top1']:.1%}", f"{found['reuse']:.0%}", gain)
        )  # fmt: skip
    if report.yardstick_kl is not None:
        shown.append(("dense in bfloat16", f"{report.yardstick_kl:.4f}", "", "", "", "", ""))
    return shown


HEADINGS = ("method", "mean KL", "largest", "above limit", "top-1", "reused", "TTFT gain")


def gained(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Predicted and measured KL of all rows that were judged."""
    return [(row.judgement.kl, row.kl) for row in rows if row.judgement is not None and not row.judgement.features.none]
