"""What was predicted of a call's closeness before its first token, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Features:
    """What is known of the error that a prefilled cache carries; all are 0 where nothing is approximate.

    Errors are squared, relative to the mean square of the layer's keys or values, averaged over layers and over keys
    and values, as in kvcomm.anchors.variance.

    Attributes:
        attended: the error that the closing request sees: a sum over tokens, weighted by the attention they receive.
        spread: the error of all tokens over the tokens of the prompt.
        first: the same as attended, by the attention of the prompt's last token alone.
    """

    attended: float = 0.0
    spread: float = 0.0
    first: float = 0.0

    def __add__(self, other: Features) -> Features:
        return Features(self.attended + other.attended, self.spread + other.spread, self.first + other.first)

    @property
    def none(self) -> bool:
        """Whether no error is left."""
        return self.spread <= 0.0


@dataclass(frozen=True)
class PartJudgement:
    """One reused segment.

    Attributes:
        kl: mean KL in nats predicted if this segment alone were approximate; 0 once all of it is computed.
        probes: tokens whose fresh KV was compared with the spliced.
        ratio: their squared error over what was expected of it, shrunk towards the call's.
        added: tokens computed again because the bound asked for it.
    """

    kl: float
    probes: int
    ratio: float
    added: int

    def __str__(self) -> str:
        more = f", {self.added} more recomputed" if self.added else ""
        return f"predicted KL {self.kl:.2g}, {self.probes} probes off {self.ratio:.1f} times the expected{more}"


@dataclass(frozen=True)
class Judgement:
    """A call's predicted closeness.

    Attributes:
        kl: predicted mean KL in nats from the dense run, over an answer.
        bound: what it stays below with the policy's confidence.
        max_kl: what the policy accepts.
        confidence: the share of calls that stay below ``bound``, by the calibration.
        calibrated: whether the prediction was fitted to this model; if not, the bound is a cautious guess.
        features: what the prediction was made from, at the end.
        passes: passes of the model, the first included.
        parts: for each part of the prompt its own, or None where it is exact, new or left by an earlier call.
    """

    kl: float
    bound: float
    max_kl: float
    confidence: float
    calibrated: bool
    features: Features
    passes: int
    parts: tuple[PartJudgement | None, ...]

    @property
    def added(self) -> int:
        """Tokens computed again because the bound asked for it."""
        return sum(part.added for part in self.parts if part is not None)

    def __str__(self) -> str:
        by = "" if self.calibrated else " (not calibrated for this model: cautious; run kvcomm calibrate)"
        if self.features.none:
            return f"predicted KL 0: all computed again, {self.passes} passes{by}"
        more = f", {self.added} more tokens computed in {self.passes} passes" if self.added else ""
        return (
            f"predicted KL {self.kl:.2g}, {self.confidence:.0%} below {self.bound:.2g}, limit {self.max_kl:g}{more}{by}"
        )
