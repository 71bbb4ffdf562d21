"""From what is known of a call's errors to a predicted closeness: a log-linear law with few coefficients, per model.

log KL = a + Σ c_f log(f), f over the fields of Features, every c_f at least 0: more error never predicts a smaller KL.
Fitted by least squares on calls of which the KL was measured. The bound is the prediction times a margin: a quantile of
measured over predicted KL over those calls, at the rank that makes it valid for one more call like them (split
conformal prediction, Lei et al. 2018, without a split: four coefficients and a hundred calls leave little to overfit).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.reuse.judgement import Features
from kvcomm.types import ModelFingerprint

log = logging.getLogger(__name__)
NAMES = tuple(f.name for f in fields(Features))
QUANTILES = (0.5, 0.8, 0.9, 0.95)
SMALLEST = 1e-12  # of a feature or a KL, before its logarithm is taken
LARGEST = 1e15  # of a number of a calibration; with smaller ones no sum of the law overflows
MAX_BYTES = 1 << 16  # of a file; one has about 500
_LARGEST_EXPONENT = 50.0
FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """How this model's KL follows from the features.

    Attributes:
        intercept: a.
        powers: c_f by the name of each feature.
        margins: for each of QUANTILES the factor by which so large a share of calls stays below the prediction.
        samples: calls it was fitted on; 0 for the cautious guess that stands in where there is none.
        weights: digests of the weights it belongs to, as in ModelFingerprint or as the maker names them.
        dtype: the KV's dtype it was measured in.
        about: model, texts and policy, for people.
    """

    intercept: float
    powers: tuple[float, ...]
    margins: tuple[float, ...]
    samples: int = 0
    weights: tuple[str, ...] = ()
    dtype: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        numbers = [self.intercept, *self.powers, *self.margins]
        if (
            len(self.powers) != len(NAMES)
            or len(self.margins) != len(QUANTILES)
            or not all(abs(number) <= LARGEST for number in numbers)
        ):
            raise InvalidInput(
                f"a calibration has {len(NAMES)} powers and {len(QUANTILES)} margins, numbers up to {LARGEST:g}; "
                "calibrate again"
            )
        if self.samples < 0:
            raise InvalidInput(f"a calibration from {self.samples} calls; give 0 or more, or calibrate again")
        if min(self.powers) < 0 or min(self.margins) <= 0 or list(self.margins) != sorted(self.margins):
            raise InvalidInput("powers must be 0 or more, and margins above 0 and not decreasing; calibrate again")

    def predict(self, found: Features) -> float:
        """Predicted mean KL in nats; 0 where no error is left, and beyond every bound where one is not finite."""
        if found.none:
            return 0.0
        if not all(math.isfinite(getattr(found, name)) for name in NAMES):
            return math.exp(_LARGEST_EXPONENT)
        logs = (math.log(max(getattr(found, name), SMALLEST)) for name in NAMES)
        exponent = self.intercept + sum(c * x for c, x in zip(self.powers, logs, strict=True))
        return math.exp(min(exponent, _LARGEST_EXPONENT))

    def margin(self, confidence: float) -> float:
        """Factor over the prediction that ``confidence`` of all calls stay below, from the quantiles kept."""
        check_confidence(confidence)
        logs = [math.log(m) for m in self.margins]
        return math.exp(float(np.interp(confidence, QUANTILES, logs)))

    def fits(self, fingerprint: ModelFingerprint) -> bool:
        """Whether it was made for this model."""
        return fingerprint.weights in self.weights and self.dtype == fingerprint.dtype

    def serves(self, fingerprint: ModelFingerprint) -> bool:
        """Whether it was fitted, and to this model where it says to which."""
        return self.samples > 0 and (not self.weights or self.fits(fingerprint))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "format": FORMAT,
            "about": self.about,
            "weights": list(self.weights),
            "dtype": self.dtype,
            "samples": self.samples,
            "intercept": self.intercept,
            "powers": dict(zip(NAMES, self.powers, strict=True)),
            "margins": {str(q): m for q, m in zip(QUANTILES, self.margins, strict=True)},
        }

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """From what ``to_json`` gave.

        Raises:
            InvalidInput: it is not that.
        """
        try:
            if data["format"] != FORMAT:
                raise InvalidInput(f"a calibration of format {data['format']!r}; this version reads {FORMAT}")
            need(data["samples"], int, "samples", "calibrate again")
            need_all(data["weights"], str, "weights", "calibrate again")
            for name in ("dtype", "about"):
                need(data[name], str, name, "calibrate again")
            return cls(
                _number(data["intercept"]),
                tuple(_number(data["powers"][name]) for name in NAMES),
                tuple(_number(data["margins"][str(q)]) for q in QUANTILES),
                data["samples"],
                tuple(data["weights"]),
                data["dtype"],
                data["about"],
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(f"not a calibration ({error!r}); write one with kvcomm calibrate") from None


def _number(value: object) -> float:
    need(value, (int, float), "a number of a calibration", "calibrate again")
    return float(value)  # type: ignore[arg-type]


def check_confidence(confidence: float) -> None:
    """Raise InvalidInput unless ``confidence`` is one that the margins reach."""
    need(confidence, (int, float), "confidence", "give a share")
    if not QUANTILES[0] <= confidence <= QUANTILES[-1]:
        raise InvalidInput(f"confidence is {confidence}; give a share of {QUANTILES[0]} to {QUANTILES[-1]}")


def fit(samples: Sequence[tuple[Features, float]], **about: Any) -> Calibration:
    """Least squares of log KL on log features, no power below 0, and the margins.

    Args:
        samples: features of a call and its measured mean KL in nats; calls without any error are left out.
        about: the other fields of Calibration.

    Raises:
        InvalidInput: fewer than 20 calls with an error.
    """
    used = [(found, kl) for found, kl in samples if not found.none]
    if len(used) < 20:
        raise InvalidInput(f"{len(used)} calls reused anything approximately; give prompts for at least 20")
    x = np.array([[math.log(max(getattr(found, name), SMALLEST)) for name in NAMES] for found, _ in used])
    y = np.array([math.log(max(kl, SMALLEST)) for _, kl in used])
    best = math.inf, 0.0, [0.0] * len(NAMES)
    for size in range(len(NAMES) + 1):
        for chosen in combinations(range(len(NAMES)), size):
            a = np.column_stack([np.ones(len(y)), x[:, chosen]])
            solved = np.linalg.lstsq(a, y, rcond=None)[0]
            squares = float(np.square(a @ solved - y).sum())
            if (solved[1:] < 0).any() or squares >= best[0]:
                continue
            powers = [0.0] * len(NAMES)
            for n, c in zip(chosen, solved[1:], strict=True):
                powers[n] = float(c)
            best = squares, float(solved[0]), powers
    residuals = np.sort(y - best[1] - x @ np.array(best[2]))
    ranks = [min(math.ceil(q * (len(y) + 1)), len(y)) - 1 for q in QUANTILES]
    return Calibration(best[1], tuple(best[2]), tuple(math.exp(residuals[r]) for r in ranks), len(used), **about)


# What one small model showed, its margins several times wider: another model's errors weigh differently.
UNCALIBRATED = Calibration(2.5, (0.65, 0.0, 0.5), (2.0, 6.0, 12.0, 25.0), about="a cautious guess")


def folder() -> Path:
    """Where ``kvcomm calibrate`` keeps what it found: KVCOMM_CALIBRATIONS, or in the user's cache."""
    own = os.environ.get("KVCOMM_CALIBRATIONS")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcomm" / "calibrations"


def save(calibration: Calibration, path: Path | None = None) -> Path:
    """Write it where ``find`` looks, or to ``path``; returns where."""
    target = path or folder() / f"{calibration.weights[0][:32]}-{calibration.dtype}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(calibration.to_json(), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, target)
    return target


def find(fingerprint: ModelFingerprint) -> Calibration | None:
    """The calibration of this model: the user's own, else one that came with the package, else None.

    Raises:
        InvalidInput: the user's own file is there and damaged.
    """
    own = folder() / f"{fingerprint.weights[:32]}-{fingerprint.dtype}.json"
    if own.is_file():
        found = read(own)
        if found.fits(fingerprint):
            return found
        log.warning("%s is of another model or dtype than its name says; it is not used", own)
    for entry in (resources.files("kvcomm.reuse") / "calibrations").iterdir():
        if entry.name.endswith(".json"):
            shipped = Calibration.from_json(json.loads(entry.read_text(encoding="utf-8")))
            if shipped.fits(fingerprint):
                return shipped
    return None


def read(path: Path) -> Calibration:
    """A calibration from a file.

    Raises:
        InvalidInput: it cannot be read or is none.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"a calibration of more than {MAX_BYTES} bytes")
        return Calibration.from_json(json.loads(data.decode("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: {error}; write it again with kvcomm calibrate") from None
