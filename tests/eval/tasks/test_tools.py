"""The tools task: enough problems, three tools at least, none shared, and the right name scores."""

from __future__ import annotations

import json

import pytest

from eval.tasks.base import Problem
from eval.tasks.tools import MAX_TOOLS, Tools
from kvcomm.tool_text import canonical_tool, tool_name


@pytest.fixture(scope="module")
def task() -> Tools:
    return Tools()


def test_there_are_at_least_100_problems_of_three_tools_or_more(task: Tools) -> None:
    problems = task.problems()
    assert len(problems) == 120
    assert all(3 <= len(problem.documents) <= MAX_TOOLS for problem in problems)
    assert {len(problem.documents) for problem in problems} >= {3, 4, 5}


def test_no_two_problems_share_a_tool(task: Tools) -> None:
    names = [tool_name(json.loads(text)) for problem in task.problems() for text in problem.documents]
    assert len(names) == len(set(names))


def test_documents_are_canonical_and_the_right_tool_is_where_it_is_said_to_be(task: Tools) -> None:
    for problem in task.problems():
        assert problem.answered_in is not None
        tools = [json.loads(text) for text in problem.documents]
        assert tuple(canonical_tool(tool) for tool in tools) == problem.documents
        assert tool_name(tools[problem.answered_in]) == problem.reference


def test_written_out_answers_score(task: Tools) -> None:
    problems = task.problems()
    assert all(task.score(problem, problem.message) == 1.0 for problem in problems)
    assert not any(task.score(a, b.message) for a, b in zip(problems, problems[1:], strict=False))


def test_scores(task: Tools) -> None:
    names = ("shop.get", "shop.get.all", "get")
    documents = tuple(canonical_tool({"name": name, "parameters": {}}) for name in names)
    problem = Problem("p", "?", documents, "shop.get")
    for answer, score in (
        ("shop.get(item=3)", 1.0),
        ("Call shop.get.", 1.0),
        ("`shop_get`", 1.0),
        ('{"name":"shop.get"}', 1.0),
        ("shop.get, not get", 1.0),
        ("get, or else shop.get", 0.0),
        ("shop.get.all()", 0.0),
        ("my_shop.get()", 0.0),
        ("shop.getter", 0.0),
        ("Shop around and get it", 0.0),
        ("", 0.0),
    ):
        assert task.score(problem, answer) == score, answer
