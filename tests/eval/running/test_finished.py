"""Finished parts of a run that was cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.files.output import NotWritten
from eval.running.finished import Finished
from kvcomm.errors import InvalidInput


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path, about = tmp_path / "parts.jsonl", {"seed": 1, "model": "m"}
    first = Finished(path, about)
    assert first.get("a") is None
    first.add("a", [{"kl": 0.5}])
    with path.open("a") as file:
        file.write('{"about": "x", "na')  # cut off
    again = Finished(path, about)
    assert again.get("a") == [{"kl": 0.5}]
    assert again.get("b") is None


def test_parts_of_another_setting_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    Finished(path, {"seed": 1}).add("a", 1)
    assert Finished(path, {"seed": 2}).get("a") is None
    done = Finished(path, {"seed": 1})
    assert done.get("a") == 1
    done.clear()
    assert not path.exists()
    done.clear()


def test_lines_that_are_no_parts_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "parts.jsonl"
    Finished(path, {}).add("a", 1)
    about = json.loads(path.read_text())["about"]
    bad = [b"{}", b"5", b"null", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"about": "%s"}' % about.encode(),
           b'{"about": "%s", "name": ["b"], "part": 1}' % about.encode(),
           b'{"about": "%s", "name": "b", "part": NaN}' % about.encode(),
           b'{"about": "%s", "name": "b", "part": 1e999}' % about.encode()]  # fmt: skip
    with path.open("ab") as file:
        file.write(b"\n".join(bad) + b"\n")
    again = Finished(path, {})
    assert (again.get("a"), again.get("b")) == (1, None)
    assert f"skipped {len(bad)} of its lines" in " ".join(capsys.readouterr().err.split())


def test_a_part_behind_one_that_was_cut_off_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    path.write_text('{"about": "x", "na')
    Finished(path, {}).add("b", 2)
    assert Finished(path, {}).get("b") == 2


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    finished = Finished(tmp_path / "parts.jsonl", {})
    with pytest.raises(NotWritten, match="part 'b' was not kept: a figure is not finite"):
        finished.add("b", [float("inf")])
    assert finished.get("b") is None and finished.path.read_text() == ""


OTHER = """
import sys
from pathlib import Path
from eval.running.finished import Finished
from kvcomm.errors import InvalidInput
try:
    finished = Finished(Path(sys.argv[1]), {})
except InvalidInput as error:
    print(error)
"""


def other(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", OTHER, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    finished = Finished(path, {})
    assert Finished(path, {}).get("a") is None  # the same run
    assert f"{path} is in use by another run" in other(path)
    finished.add("a", 1)
    finished.clear()
    assert not path.exists()
    assert other(path) == ""
    assert not path.exists()  # it did nothing


def test_a_file_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/proc/nope/x")):
        with pytest.raises(InvalidInput, match="cannot be written|no regular file"):
            Finished(path, {})
