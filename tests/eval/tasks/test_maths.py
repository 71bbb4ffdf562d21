"""Exact answers: what an answer ends in, and what counts as the same."""

from __future__ import annotations

import pytest

from eval.tasks.base import Problem
from eval.tasks.maths import Maths, final


def test_there_are_374_problems() -> None:
    task = Maths()
    problems = task.problems()
    assert len(problems) == 374 and problems[0].reference == "204" and problems[0].documents == ()
    for problem in problems:
        assert task.score(problem, problem.message) == 1.0, problem.id
        assert task.score(problem, f"So the answer is: **{problem.reference}**.") == 1.0, problem.id


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"First \boxed{3}, then \boxed{\frac{1}{2}}. That took 7 steps.", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("The answer is 5 because 2 + 3 = 5 and 6 is more.", "5"),
        ("The answer is $x = 12$, since 13 is odd.", "x = 12"),
        ("Answer: 1,024\nThis is 2 to the 10.", "1,024"),
        ("3 apples and 4 pears make 7", "7"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(answer: str, found: str | None) -> None:
    assert final(answer) == found


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("204", r"\boxed{204}", 1.0),
        ("204", r"\boxed{204.0}", 1.0),
        ("73", r"\boxed{073}", 1.0),
        ("4495", r"\boxed{4,495}", 1.0),
        ("-2", "The answer is -2.", 1.0),
        ("-2", "The answer is 2.", 0.0),
        (r"$\frac{3}{4}$", r"\boxed{\dfrac34}", 1.0),
        (r"$\frac{3}{4}$", "Answer: 3/4", 1.0),
        (r"$\frac{3}{4}$", "Answer: 0.75", 0.0),
        (r"$2\sqrt{2}$", r"\boxed{x = 2 \sqrt{2}}", 1.0),
        ("12", r"\boxed{12\text{ cm}}", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("90", r"\boxed{90^\circ}", 1.0),
        ("20", "It is 201", 0.0),
        ("20", "", 0.0),
    ],
)
def test_scores(reference: str, answer: str, score: float) -> None:
    assert Maths().score(Problem("p", "?", (), reference), answer) == score
