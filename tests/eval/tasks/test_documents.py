"""Questions about retrieved passages: enough of them, answerable, alone with their passages."""

from __future__ import annotations

import pytest

from eval.tasks.base import Problem, mentions
from eval.tasks.documents import Documents
from eval.tasks.retrieval import BagOfWords


@pytest.fixture(scope="module")
def task() -> Documents:
    return Documents()


def test_there_are_at_least_60_problems_that_share_no_passage(task: Documents) -> None:
    problems = task.problems()
    documents = [document for problem in problems for document in problem.documents]
    assert len(problems) >= 60 and len(documents) == len(set(documents)) == 3 * len(problems)


def test_the_answer_is_in_one_document_and_not_in_the_question(task: Documents) -> None:
    for problem in task.problems():
        before, after = problem.task_text.split('"', 1)[1].rsplit('"', 1)[0].split("_____")
        whole = f"{before}{problem.reference}{after}"
        assert problem.answered_in is not None
        assert [whole in text for text in problem.documents].index(True) == problem.answered_in
        assert sum(whole in text for text in problem.documents) == 1
        assert whole in problem.worked and not mentions(problem.task_text, problem.reference)


def test_the_answer_has_no_fixed_place(task: Documents) -> None:
    places = [problem.answered_in for problem in task.problems()]
    assert min(places.count(place) for place in range(3)) > len(places) / 6


def test_scores(task: Documents) -> None:
    problem = Problem("a", "?", (), "lazy")
    for answer, score in (
        ("The missing word is LAZY.", 1.0),
        ('"lazy"', 1.0),
        ("lazily", 0.0),
        ("lazy_eval", 0.0),
        ("", 0.0),
    ):
        assert task.score(problem, answer) == score, answer


def test_retrieval_finds_by_shared_and_rare_words() -> None:
    index = BagOfWords(["a cat sat on the mat", "a dog sat on the log", "the the the the on on on", "Cats_and_dogs"])
    assert index.search("which dog?", 1) == [1]
    assert index.search("the mat", 2)[0] == 0
    assert sorted(index.search("nothing known", 9)) == [0, 1, 2, 3]
