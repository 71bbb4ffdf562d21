"""Files are written whole or not at all, and what cannot be written is said before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.files.output import NotWritten, markdown_table, require_different, require_writable, write_json, write_text
from kvcomm.errors import InvalidInput


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_json(path, {"a": 1.5})
    assert path.read_text() == '{\n "a": 1.5\n}\n'
    path.chmod(0o640)
    write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode() and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["a.json"]


FULL = """
import resource, signal, sys
from pathlib import Path
from eval.files.output import NotWritten, write_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_json(Path(sys.argv[1]), {"a": "x" * 1000})
except NotWritten as error:
    print(error)
"""


def test_a_good_file_outlives_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert f"{path} was not written" in done.stdout and "make room" in done.stdout, done.stderr
    assert path.read_text() == '{\n "a": 1\n}\n' and os.listdir(tmp_path) == ["a.json"]


def test_a_figure_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(NotWritten, match=r"a\.json was not written: a figure is not finite"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == '{\n "a": 1\n}\n'


def test_a_link_stays_one_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "x"
    with pytest.raises(InvalidInput, match="is a folder"):
        write_text(tmp_path, "x")
    with pytest.raises(NotWritten, match=r"/proc/nope/x was not written"):
        write_text(Path("/proc/nope/x"), "x")


def test_what_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "x.json")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "file").write_text("kept")
    require_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    os.mkfifo(tmp_path / "fifo")
    for path in ("/proc/nope/x.json", "/dev/null", str(tmp_path), f"{tmp_path}/file/x", f"{tmp_path}/fifo",
                 f"{tmp_path}/{'x' * 300}"):  # fmt: skip
        with pytest.raises(InvalidInput, match=r"cannot be written|give the path of a file"):
            require_writable(Path(path))


def test_what_goes_beside_results_replaces_nothing(tmp_path: Path) -> None:
    out, link, hard = tmp_path / "x.json", tmp_path / "y.svg", tmp_path / "z.md"
    assert require_writable(out, ".svg", ".md") == (tmp_path / "x.svg", tmp_path / "x.md")
    for path in (Path(""), Path("."), Path("/")):
        with pytest.raises(InvalidInput, match="no file's name"):
            require_writable(path)
    with pytest.raises(InvalidInput, match=r"would be replaced by the .svg file"):
        require_writable(tmp_path / "x.svg", ".svg")
    out.write_text("kept")
    link.symlink_to(out)
    hard.hardlink_to(out)
    require_different(results=out, page=tmp_path / "x.html")
    for path in (link, hard, tmp_path / "more" / ".." / "x.json"):
        with pytest.raises(InvalidInput, match="the same file for page as for results"):
            require_different(results=out, page=path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_without_permission_nothing_is_begun(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInput, match="Permission denied"):
        require_writable(tmp_path / "x.json")


COMMANDS = ("tail", "tools-story", "peers", "pareto", "gate", "trust", "verified", "learning", "near", "offsets",
            "ablations", "demo")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_loads_a_model_for_an_output_that_cannot_be(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eval import __main__ as main
    from eval.running.setting import Setting

    def loaded(name: str | None) -> Setting:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Setting, "load", loaded)
    monkeypatch.setattr(sys, "argv", ["eval", command, "--out", "/proc/nope/x.json"])
    with pytest.raises(SystemExit) as raised:
        main.main()
    assert raised.value.code == 1
    assert "error: /proc/nope/x.json cannot be written" in capsys.readouterr().err


def test_cells_of_a_table_stay_cells() -> None:
    table = markdown_table(("a|b",), [["x\ny"], ["<script>"], ["\\|"]])
    assert table.split("\n") == ["| a\\|b |", "| --- |", "| x y |", "| &lt;script> |", "| \\\\\\| |"]
