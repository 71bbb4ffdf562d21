"""Facts hidden in prose: each in its place once, and only the one asked for scores."""

from __future__ import annotations

from eval.tasks.base import Problem
from eval.tasks.needle import Needle


def test_each_fact_is_in_one_document_of_one_problem() -> None:
    problems = Needle().problems()
    assert len(problems) >= 100
    everything = "\n".join(document for problem in problems for document in problem.documents)
    for problem in problems:
        assert problem.answered_in is not None and len(problem.documents) == 3
        assert problem.worked in problem.documents[problem.answered_in]
        assert everything.count(problem.worked) == 1
    assert len({document for problem in problems for document in problem.documents}) == 3 * len(problems)


def test_scores() -> None:
    documents = tuple(
        f"Prose. The locker number of the {what} is {n}. More." for what, n in (("a", 10001), ("b", 20002))
    )
    problem = Problem("b", "?", documents, "20002")
    task = Needle()
    for answer, score in (
        ("It is 20002.", 1.0),
        ("20002", 1.0),
        ("120002", 0.0),
        ("It is 10001.", 0.0),
        ("10001 or 20002", 0.0),
        ("", 0.0),
    ):
        assert task.score(problem, answer) == score, answer
