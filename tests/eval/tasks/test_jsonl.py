"""A user's own file: read as described, and every mistake named with its line and field."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eval.files.reading import read_file
from eval.tasks import make_task
from eval.tasks.base import Problem
from kvcomm.errors import InvalidInput

GOOD = {"question": "How old is Ann?", "segments": ["Ann is 7.", "Bob is 8."]}


def written(folder: Path, *lines: object) -> str:
    path = folder / "mine.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return str(path)


def test_lines_become_problems(tmp_path: Path) -> None:
    full = GOOD | {"id": "ann", "answer": "7", "worked": "Ann is 7 years old.", "answered_in": 0}
    task = make_task(written(tmp_path, full, b"", GOOD, GOOD | {"answer": "8", "segments": []}))
    documents = ("Ann is 7.", "Bob is 8.")
    assert task.name == "mine"
    assert task.problems() == [
        Problem("ann", "How old is Ann?", documents, "7", "Ann is 7 years old.", 0),
        Problem("3", "How old is Ann?", documents, "", "How old is Ann?", None),
        Problem("4", "How old is Ann?", (), "8", "How old is Ann?\n8", None),
    ]


def test_scores(tmp_path: Path) -> None:
    task = make_task(written(tmp_path, GOOD | {"answer": "seven  years"}, GOOD))
    scored, unscored = task.problems()
    assert task.score(scored, "She is Seven years old.") == 1.0
    assert task.score(scored, "seventy-seven yearss") == task.score(scored, "") == 0.0
    assert task.score(unscored, "7") is None


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{", "line 2: not JSON"),
        (b'{"question": "\xff"}', "line 2: not JSON in UTF-8"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'{"id": "a", "id": "b"}', "field 'id' stands twice"),
        ([], "line 2: a list"),
        ({"segments": []}, "line 2, field 'question': is missing"),
        (GOOD | {"question": 3}, "field 'question': is of type int"),
        (GOOD | {"question": " "}, "field 'question': is empty"),
        ({"question": "?"}, "field 'segments': is missing"),
        (GOOD | {"segments": "one"}, "field 'segments': is of type str"),
        (GOOD | {"segments": ["a", None]}, r"line 2, field 'segments\[1\]': is of type NoneType"),
        (GOOD | {"segments": ["a", ""]}, r"line 2, field 'segments\[1\]': is empty"),
        (GOOD | {"answer": None}, "field 'answer': is of type NoneType"),
        (GOOD | {"worked": ["x"]}, "field 'worked': is of type list"),
        (GOOD | {"answered_in": 2}, "field 'answered_in': 2 must"),
        (GOOD | {"answered_in": -1}, "field 'answered_in': -1 must"),
        (GOOD | {"answered_in": True}, "field 'answered_in': True must"),
        (GOOD | {"id": "1"}, "line 2, field 'id': '1' is taken"),
        (GOOD | {"id": 5}, "field 'id': is of type int"),
        (GOOD | {"qestion": "?"}, "line 2, field 'qestion': there is no such field"),
        (GOOD | {"question": "\ud800"}, "field 'question': half a surrogate"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, line: object, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        make_task(written(tmp_path, GOOD, line)).problems()


def test_files_that_are_not_there_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"absent\.jsonl cannot be read"):
        make_task(str(tmp_path / "absent.jsonl")).problems()
    with pytest.raises(InvalidInput, match="has no lines"):
        make_task(written(tmp_path)).problems()
    with pytest.raises(InvalidInput, match="limit"):
        path = tmp_path / "large.jsonl"
        with open(path, "wb") as large:
            large.truncate(2**28 + 1)
        make_task(str(path)).problems()


def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("fifo", "zero", "folder"):
        with pytest.raises(InvalidInput, match=rf"{name}\.jsonl cannot be read \(it is no regular file\)"):
            make_task(str(tmp_path / f"{name}.jsonl")).problems()


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 11)
    assert read_file(path, "a file", 11) == b"x" * 11
    with pytest.raises(InvalidInput, match="has 11 bytes, the limit is 10; split it"):
        read_file(path, "a file", 10)
    for endless in ("/proc/self/maps", "/proc/cpuinfo"):  # of size 0, says the system
        with pytest.raises(InvalidInput, match="the limit is 10"):
            read_file(Path(endless), "a file", 10)
