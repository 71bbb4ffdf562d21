"""HumanEval's data, what counts as an answer's program, and scores."""

from __future__ import annotations

import time

import pytest

from eval.sandbox.program import Outcome, Way
from eval.tasks import TASKS, make_task
from eval.tasks.humaneval import HumanEval, SandboxError, complete
from kvcomm.errors import InvalidInput

PROMPT = 'import math\n\n\ndef half(x):\n    """Half of x."""\n'
WANT = "def half(x):"


@pytest.fixture(scope="module")
def task(namespaces: Way) -> HumanEval:
    return HumanEval(execute=True)


def test_there_are_164_problems(task: HumanEval) -> None:
    problems = task.problems()
    assert len(problems) == 164 and [p.id for p in problems[:2]] == ["HumanEval/0", "HumanEval/1"]
    assert all(p.task_text and p.reference and p.documents == () for p in problems)


def test_references_pass_as_continuation_and_as_message(task: HumanEval) -> None:
    for problem in task.problems()[::16]:
        assert task.score(problem, problem.reference) == 1.0, problem.id
        message = f"Here it is:\n\n```python\n{problem.task_text}{problem.reference}```\nIt works like this."
        assert task.score(problem, message) == 1.0, problem.id


@pytest.mark.slow
def test_all_references_pass_and_nothing_empty_does(task: HumanEval) -> None:
    problems = task.problems()
    assert [p.id for p in problems if task.score(p, p.reference) != 1.0] == []
    assert [p.id for p in problems if task.score(p, "    pass\n") != 0.0] == []


def test_wrong_answers_fail(task: HumanEval) -> None:
    problem = task.problems()[0]
    for answer in ("", "    return None\n", "    import sys\n    sys.exit(0)\n", "I do not know."):
        assert task.score(problem, answer) == 0.0, answer


@pytest.mark.parametrize(
    "answer",
    [
        "    return type('Any', (), {'__eq__': lambda *_: True, '__lt__': lambda *_: True})()\n",
        "    return type('Any', (list,), {'__eq__': lambda *_: True})()\n",
        "    import sys\n    frame = sys._getframe()\n    while frame:\n        frame.f_globals['check'] = print\n"
        "        frame = frame.f_back\n",
        '    import os\n    for n in range(64):\n        try: os.write(n, b\'ready\\n{"status": "passed"}\')\n'
        "        except OSError: pass\n    os._exit(0)\n",
        "    import os\n    os._exit(71)\n",
        "    import builtins\n    builtins.AssertionError = int\n    builtins.abs = lambda x: 0\n",
    ],
)
def test_answers_that_cheat_fail(answer: str, task: HumanEval) -> None:
    assert all(task.score(problem, answer) == 0.0 for problem in task.problems()[:6])


def test_without_a_sandbox_executing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Outcome("refused", "no namespaces here", "none", 0.0)
    monkeypatch.setattr("eval.tasks.humaneval.run_program", lambda *_, **__: refused)
    with pytest.raises(InvalidInput, match="no namespaces here.*KVCOMM_SANDBOX"):
        HumanEval(execute=True)
    monkeypatch.setenv("KVCOMM_SANDBOX", "none")
    with pytest.raises(InvalidInput, match="KVCOMM_SANDBOX is 'none'"):
        HumanEval(execute=True)


def test_an_answer_that_could_not_be_run_has_no_score(task: HumanEval, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Outcome("refused", "no namespaces here", "none", 0.0)
    monkeypatch.setattr("eval.tasks.humaneval.run_program", lambda *_, **__: refused)
    problem = task.problems()[0]
    with pytest.raises(SandboxError, match="HumanEval/0 was not executed .no namespaces here."):
        task.score(problem, problem.reference)


def test_nothing_runs_unless_asked_for(task: HumanEval, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.tasks.humaneval.run_program", lambda *_, **__: pytest.fail("it ran"))
    quiet = make_task("humaneval")
    assert quiet.score(quiet.problems()[0], "    return 1") is None


@pytest.mark.parametrize(
    "answer",
    [
        "    return x / 2",
        "    return x / 2\n\nprint(half(2))\nraise SystemExit",
        "    return x / 2\n\nThis function halves its argument.",
        "```python\ndef half(x):\n    return x / 2\n```",
        "Sure!\n```py\nimport math\n\ndef half(x):\n    return x / 2\n\nprint(half(3))\n```\nDone.",
        "```\n    return x / 2\n```",
        "```python\ndef half(x):\n    return math.floor(x) / 2\n\n\ndef other():\n    pass",
        "    return helper(x)\n\n\ndef helper(x):\n    return x / 2\n\nExample: half(2)",
    ],
)
def test_an_answer_becomes_a_program(answer: str) -> None:
    scope: dict[str, object] = {"__name__": "answer"}
    exec(complete(PROMPT, answer, "half"), scope)  # noqa: S102
    assert scope["half"](4) == 2  # type: ignore[operator]


LENGTH = 200_000
LONG = [
    piece * (LENGTH // len(piece))
    for piece in ("def \n", "def half(x):\n", "```", "```python\n", "$", "\\text{", "\\boxed{", "1,", "1 ", "(", "{",
                  '"', " \n", "\t", "answer is ", "\\boxed{}", "}")
] + [f"answer is x{' ' * LENGTH}y", f"1{' ' * LENGTH}y", f"answer is{':' * LENGTH}"]  # fmt: skip


@pytest.mark.parametrize("name", ["humaneval", "maths", "tools", "documents", "needle"])
def test_a_long_answer_is_scored_at_once(name: str) -> None:
    made = make_task(name)
    problem = made.problems()[0]
    started = time.process_time()
    for answer in LONG:
        complete(PROMPT, answer, "half") if name == "humaneval" else made.score(problem, answer)
    assert time.process_time() - started < 5


def test_an_unknown_task_is_named_with_the_known() -> None:
    with pytest.raises(InvalidInput, match=r"'gsm'.*humaneval"):
        make_task("gsm")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_keeps_the_contract(name: str) -> None:
    task = make_task(name)
    problems = task.problems()
    assert task.name == name and problems == make_task(name).problems()
    assert len({p.id for p in problems}) == len(problems)
    assert task.score(problems[0], "") in (None, 0.0)
