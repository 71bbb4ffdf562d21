"""Every selection on a small case worked out by hand: known lengths, known deviations, known attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.select import (
    Attended,
    ByScore,
    Deviation,
    Leading,
    LeadingShare,
    PerSegment,
    PredictedError,
    Product,
    Scene,
    Score,
    SegmentError,
    Selection,
    Union,
)
from tests.reuse.hand import LAYERS, ScriptedBackend, scene

PARTS = [("exact", 3), ("approximate", 4), ("new", 2), ("approximate", 5), ("new", 2)]
# approximate positions: 3 4 5 6 and 9 10 11 12 13; new: 7 8 and 14 15


@dataclass(frozen=True)
class Given(ByScore):
    """Scores as given."""

    values: tuple[float, ...] = ()
    extra: float = 0.0

    def score(self, scene: Scene) -> Score:
        return Score(torch.tensor(self.values), self.extra)


def test_the_scene_knows_its_positions() -> None:
    made = scene(PARTS)
    assert made.approximate == (3, 4, 5, 6, 9, 10, 11, 12, 13)
    assert made.new == (7, 8, 14, 15)


def test_leading_takes_the_first_of_each_segment() -> None:
    assert Leading(2).choose(scene(PARTS)).positions == (3, 4, 9, 10)
    assert Leading(5).choose(scene(PARTS)).positions == (3, 4, 5, 6, 9, 10, 11, 12, 13)
    assert Leading(0).choose(scene(PARTS)).positions == ()


@pytest.mark.parametrize(
    ("share", "positions"),
    [
        (0.0, ()),
        (0.2, (3, 9)),  # 1.8 wanted: two, one a segment
        (0.4, (3, 4, 9, 10)),  # 3.6 wanted
        (0.6, (3, 4, 5, 9, 10, 11)),  # 5.4: 6 is nearer than 4
        (1.0, (3, 4, 5, 6, 9, 10, 11, 12, 13)),
    ],
)
def test_leading_share_takes_the_same_number_of_each(share: float, positions: tuple[int, ...]) -> None:
    assert LeadingShare(share).choose(scene(PARTS)).positions == positions


def test_deviation_compares_fresh_values_at_its_layer_only() -> None:
    # Squared deviation at layer 1, by position: 5 -> 2² + 1² = 5, 10 -> 3² = 9, 12 -> 1, others 0. Large keys at layer
    # 1 and large values at layer 0 must not count.
    def write(buffer: KVBuffer, positions: Sequence[int]) -> None:
        buffer.values[1, 0, 5, 0], buffer.values[1, 1, 5, 2] = 2.0, 1.0
        buffer.values[1, 1, 10, 1] = -3.0
        buffer.values[1, 0, 12, 0] = 1.0
        buffer.keys[1, 0, 3], buffer.values[0, 0, 4] = 50.0, 50.0

    backend = ScriptedBackend(write)
    made = scene(PARTS, backend)
    chosen = Deviation(0.22).choose(made)  # 1.98 of 9 tokens: two
    assert chosen.positions == (5, 10)
    fresh = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert backend.passes == [([100 + p for p in fresh], fresh, 1)]
    assert chosen.extra_tokens == pytest.approx(7 * 2 / LAYERS)  # seven tokens computed in two of four layers
    assert Deviation(0.33).choose(scene(PARTS, ScriptedBackend(write))).positions == (5, 10, 12)


def test_deviation_ties_go_to_the_earlier_token() -> None:
    assert Deviation(0.34).choose(scene(PARTS)).positions == (3, 4, 5)


def test_attended_takes_what_the_last_part_looks_at() -> None:
    attention = torch.zeros(2, 16)
    attention[0, [4, 6, 0, 14]] = torch.tensor([0.3, 0.1, 0.5, 0.1])
    attention[1, [6, 11, 14, 15]] = torch.tensor([0.3, 0.25, 0.25, 0.2])
    # means: 4 -> 0.15, 6 -> 0.2, 11 -> 0.125; 0, 14 and 15 are not approximate
    backend = ScriptedBackend(attention=attention)
    chosen = Attended(0.22).choose(scene(PARTS, backend))
    assert chosen.positions == (4, 6)
    assert backend.passes == [([107, 108, 114, 115], [7, 8, 14, 15], [14, 15])]
    assert chosen.extra_tokens == 4
    assert Attended(0.33).choose(scene(PARTS, backend)).positions == (4, 6, 11)


def test_attended_counts_a_spliced_question_first() -> None:
    attention = torch.zeros(2, 8)
    attention[:, 2] = 0.9
    backend = ScriptedBackend(attention=attention)
    parts = [("approximate", 5), ("new", 1), ("approximate", 2), ("new", 0)]
    chosen = Attended(0.43).choose(scene(parts, backend))  # 3.01 of 7
    assert chosen.positions == (2, 6, 7)
    assert backend.passes == [([105, 106, 107], [5, 6, 7], [6, 7])]
    assert chosen.extra_tokens == 3


def test_predicted_error_without_observations_goes_by_the_start_of_segments() -> None:
    assert PredictedError(0.22).choose(scene(PARTS)).positions == (3, 9)
    assert PredictedError(0.44).choose(scene(PARTS)).positions == (3, 4, 9, 10)


def test_segment_error_takes_segments_by_their_mean() -> None:
    parts = scene([("approximate", 2), ("new", 1), ("approximate", 4), ("new", 1)])
    # without observations a token's error goes by 1 / (index + 1): means 0.75 and 0.52
    assert SegmentError(0.5).choose(parts).positions == (0, 1, 3)
    both = Product(0.5, (PredictedError(), SegmentError()))  # 0.75 0.375 | 0.52 0.26 0.17 0.13
    assert both.choose(parts).positions == (0, 1, 3)
    assert Product(0.34, both.factors).choose(parts).positions == (0, 3)


def test_union_adds_positions_and_costs() -> None:
    given = Given(0.22, (0, 5, 0, 0, 0, 4, 0, 0, 0), extra=2.5)
    assert given.choose(scene(PARTS)).positions == (4, 10)
    both = Union(Leading(1), given).choose(scene(PARTS))
    assert both.positions == (3, 4, 9, 10)
    assert both.extra_tokens == 2.5


def test_product_needs_both() -> None:
    a = Given(0.0, (9, 1, 3, 0, 0, 2, 0, 0, 1), extra=1.0)
    b = Given(0.9, (0, 1, 2, 9, 0, 4, 0, 0, 3), extra=2.0)
    chosen = Product(0.22, (a, b)).choose(scene(PARTS))
    assert chosen.positions == (5, 10)  # products: 0 1 6 0 0 8 0 0 3
    assert chosen.extra_tokens == 3.0


@pytest.mark.parametrize(
    "selection", [Leading(3), LeadingShare(0.3), Deviation(0.3), PredictedError(0.3), Union(Leading(1), Leading(2))]
)
def test_nothing_approximate_means_nothing_chosen(selection: Selection) -> None:
    assert selection.choose(scene([("exact", 3), ("new", 2)])).positions == ()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_are_fractions(share: float) -> None:
    for kind in (LeadingShare, Deviation, Attended, PredictedError):
        with pytest.raises(InvalidInput, match="fraction of the approximate tokens"):
            kind(share)


def test_refuses_other_wrong_input() -> None:
    with pytest.raises(InvalidInput, match="give 1 or more"):
        Deviation(0.1, layer=0)
    with pytest.raises(InvalidInput, match="of a model of 4 layers"):
        Deviation(0.1, layer=4).choose(scene(PARTS))
    with pytest.raises(InvalidInput, match="two or more selections"):
        Product(0.1, (Deviation(0.1),))
    with pytest.raises(InvalidInput, match="one each"):
        Given(0.5, (1.0, 2.0)).choose(scene(PARTS))
    with pytest.raises(InvalidInput, match="one each"):
        Given(0.5, (float("nan"),) * 9).choose(scene(PARTS))
    with pytest.raises(InvalidInput, match="leading k"):
        Leading(-1)


def test_per_segment_takes_the_highest_of_the_whole_prompt() -> None:
    given = Given(1.0, (0, 5, 1, 0, 0, 4, 3, 2, 0), extra=2.5)
    chosen = PerSegment(2, given).choose(scene(PARTS))
    assert chosen.positions == (4, 10, 11, 12)  # two segments: four tokens, wherever they are
    assert chosen.extra_tokens == 2.5
    assert PerSegment(0, given).choose(scene(PARTS)).positions == ()
    assert len(PerSegment(100, given).choose(scene(PARTS)).positions) == 9
    with pytest.raises(InvalidInput, match="whole number of tokens"):
        PerSegment(-1, given)


def test_predicted_error_always_takes_the_closing_request() -> None:
    parts = [("approximate", 5), ("new", 1), ("approximate", 2), ("new", 0)]
    assert PredictedError(0.43).choose(scene(parts)).positions == (0, 6, 7)
