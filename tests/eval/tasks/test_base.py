"""What counts as an answer that is mentioned."""

from __future__ import annotations

import pytest

from eval.tasks.base import mentions


@pytest.mark.parametrize(
    "answer",
    ["5", "It costs 5.", "5, 6 and 7", "(5)", "5%", "= 5", "- 5", "pages 3-5", "item-5", "$5", "5\n", "5!", "so: 5.",
     "10-5", "4.2, 5"],
)  # fmt: skip
def test_a_number_is_mentioned(answer: str) -> None:
    assert mentions(answer, "5")


@pytest.mark.parametrize(
    "answer",
    ["-5", "it is -5.", "(-5)", "−5", "+5", "= -5", "-$5", "5.14", "3.5", "1,5", "5,000", "55", "15", ".5", "5th",
     "x5", ""],
)  # fmt: skip
def test_another_number_is_not(answer: str) -> None:
    assert not mentions(answer, "5")


@pytest.mark.parametrize(
    ("answer", "wanted", "found"),
    [
        ("3.14", "3", False),
        ("3.14", "14", False),
        ("it is 3.14.", "3.14", True),
        ("13.14", "3.14", False),
        ("it is -5.", "-5", True),
        ("it is -5.2", "-5", False),
        ("it is 5", "-5", False),
        ("$5.50", "$5", False),
        ("about $5.", "$5", True),
        ("in Room  12.", "room 12", True),
        ("room 12.5", "room 12", False),
        ("-12 May", "12 May", False),
        ("", "", False),
    ],
)
def test_signs_and_points(answer: str, wanted: str, found: bool) -> None:
    assert mentions(answer, wanted) is found
