"""The law is found again, never predicts less for more error, and its margins cover what they say."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvcomm.errors import InvalidInput
from kvcomm.reuse.calibration import QUANTILES, UNCALIBRATED, Calibration, find, fit, folder, read, save
from kvcomm.reuse.judgement import Features
from tests.anchors.synthetic import FINGERPRINT


def drawn(count: int, seed: int, noise: float = 0.5) -> list[tuple[Features, float]]:
    """Calls under a known law: KL = e² · attended^0.8 · first^0.5 · noise."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        features = Features(*(math.exp(draw.gauss(-4, 1)) for _ in range(3)))
        law = 2 + 0.8 * math.log(features.attended) + 0.5 * math.log(features.first)
        found.append((features, math.exp(law + draw.gauss(0, noise))))
    return found


def test_the_law_is_found_again() -> None:
    found = fit(drawn(400, 1, noise=0.05))
    assert found.intercept == pytest.approx(2, abs=0.1)
    assert found.powers == pytest.approx((0.8, 0.0, 0.5), abs=0.03)
    assert found.samples == 400


def test_no_power_is_below_zero() -> None:
    falling = [(features, 1.0 / features.attended) for features, _ in drawn(50, 2)]
    found = fit(falling)
    assert found.powers[0] == 0.0 and min(found.powers) >= 0.0
    one, other = Features(0.01, 0.02, 0.01), Features(0.02, 0.03, 0.02)
    assert found.predict(one) <= found.predict(other)


@pytest.mark.parametrize("quantile", QUANTILES)
def test_margins_cover_calls_never_seen(quantile: float) -> None:
    found = fit(drawn(200, 3))
    unseen = drawn(4000, 4)
    covered = sum(kl <= found.predict(features) * found.margin(quantile) for features, kl in unseen) / len(unseen)
    assert covered == pytest.approx(quantile, abs=0.06)


def test_no_error_is_no_kl() -> None:
    assert UNCALIBRATED.predict(Features()) == 0.0
    assert UNCALIBRATED.predict(Features(0.1, 0.1, 0.1)) > 0.0


def test_margin_between_quantiles() -> None:
    made = Calibration(0.0, (1.0, 0.0, 0.0), (1.0, 2.0, 4.0, 8.0))
    assert made.margin(0.9) == pytest.approx(4.0)
    assert 2.0 < made.margin(0.85) < 4.0
    with pytest.raises(InvalidInput, match="confidence is 0.99"):
        made.margin(0.99)


def test_too_few_calls_are_refused() -> None:
    with pytest.raises(InvalidInput, match="19 calls"):
        fit([*drawn(19, 5), (Features(), 0.0)])


def test_it_is_kept_and_found_by_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMM_CALIBRATIONS", str(tmp_path))
    assert find(FINGERPRINT) is None
    made = fit(drawn(50, 6), weights=(FINGERPRINT.weights,), dtype="float32", about="a test")
    path = save(made)
    assert path.parent == folder() == tmp_path and find(FINGERPRINT) == made
    assert find(replace(FINGERPRINT, dtype="bfloat16")) is None and find(replace(FINGERPRINT, weights="other")) is None
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match=path.name):
        find(FINGERPRINT)


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"powers": {}}, {"intercept": None}, {"margins": {"0.5": 1}}, {"samples": "many"}]
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(UNCALIBRATED.to_json() | change), encoding="utf-8")
    with pytest.raises(InvalidInput, match="c.json"):
        read(path)


@pytest.mark.parametrize(
    "fields", [(0.0, (1.0,), (1.0,) * 4), (math.nan, (1.0,) * 3, (1.0,) * 4), (0.0, (-1.0, 0.0, 0.0), (1.0,) * 4)]
)
def test_wrong_numbers_are_refused(fields: tuple[float, tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(InvalidInput):
        Calibration(*fields)


def written(**change: object) -> str:
    return json.dumps(UNCALIBRATED.to_json() | change)


HOSTILE = {
    "deep": "[" * 20_000 + "]" * 20_000,
    "long": json.dumps(UNCALIBRATED.to_json()) + " " * (1 << 17),
    "larger than any float": written().replace("2.5", "1" + "0" * 400),
    "so large that sums overflow": written(powers=dict.fromkeys(("attended", "spread", "first"), 1e308)),
    "infinite samples": written(samples=math.inf),
    "samples below 0": written(samples=-1),
    "samples as a share": written(samples=0.5),
    "letters for weights": written(weights="abc"),
    "a number in words": written(intercept="2.5"),
    "true": written(intercept=True),
    "infinite margins": written(margins=dict.fromkeys(map(str, QUANTILES), math.inf)),
    "a name that is none": written(about={"a": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises(InvalidInput, match="c.json"):
        read(path)


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="more than 65536 bytes"):
        read(Path("/dev/zero"))


def test_a_file_of_another_model_is_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCOMM_CALIBRATIONS", str(tmp_path))
    other = fit(drawn(50, 6), weights=("other",), dtype="float32")
    path = save(other, tmp_path / f"{FINGERPRINT.weights[:32]}-float32.json")
    assert find(FINGERPRINT) is None and path.name in caplog.text
    assert other.samples and not other.serves(FINGERPRINT)
    assert replace(other, weights=()).serves(FINGERPRINT)  # says nothing of a model: whoever passes it vouches


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["attended", "spread", "first"])
def test_what_is_not_finite_is_beyond_every_bound(bad: float, name: str) -> None:
    assert UNCALIBRATED.predict(replace(Features(0.1, 0.1, 0.1), **{name: bad})) > 1e20
