"""The command line, on a folder made by the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm.cli import app
from kvcomm.store import Attributes, DiskStore, Keyring, Priority
from kvcomm.store.testing import ONE, TWO, holds, sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DiskStore(tmp_path / "s") as store:
        for number in range(4):
            store.put(*sample(number, attributes=Attributes(Priority.TOOL, f"search@{number % 2}")))
        store.put(*sample(9, namespace=TWO, attributes=Attributes(ttl_s=1e-6)))
    return tmp_path / "s"


def call(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["store", *map(str, words)])
    assert result.exit_code == status, result.output
    return str(result.stdout)


def test_ls(folder: Path) -> None:
    rows = json.loads(call("ls", folder, "--json", "--namespace", "one"))
    assert {row["content"] for row in rows} == {sample(n)[0].content for n in range(4)}
    assert {row["group"] for row in rows} == {"search@0", "search@1"}
    assert "4 entries" in call("ls", folder, "--namespace", "one")


def test_ls_is_readable_in_a_narrow_terminal_and_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry has one line, whatever the width, its numbers in columns; namespace and model are said once."""
    rows = json.loads(call("ls", folder, "--json"))
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("ls", folder).splitlines()
    assert lines[0] == f"{len(rows)} entries"
    assert len([line for line in lines if line.startswith("namespace ")]) == len({row["namespace"] for row in rows})
    for row in rows:
        (line,) = [line for line in lines if line.startswith(f"  {row['content'][:12]} ")]
        assert line.split()[1] == str(row["tokens"]) and len(line) < 80
        assert not row["group"] or f"(tool) group {row['group']}" in line


def test_stats(folder: Path) -> None:
    assert json.loads(call("stats", folder, "--json"))["one"]["entries"] == 4
    assert "one" in call("stats", folder)


def test_verify(folder: Path) -> None:
    assert "0 bad" in call("verify", folder)
    path = next((folder / "entries" / "one").rglob("*/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = json.loads(call("verify", folder, "--json", status=1))
    assert found["checked"] == 5
    assert [item["file"] for item in found["bad"]] == [str(path)]
    assert "0 bad" in call("verify", folder)


def test_gc(folder: Path) -> None:
    (folder / "tmp" / "dead.1").write_bytes(b"x")
    (folder / "aside" / "bad").write_bytes(b"x")
    found = json.loads(call("gc", folder, "--json", "--max-entries", 2))
    assert (found["expired"], found["set_aside"], found["evicted"]) == (1, 1, 2)
    assert not (folder / "tmp" / "dead.1").exists()
    assert json.loads(call("stats", folder, "--json"))["one"]["entries"] == 2


def test_rm(folder: Path) -> None:
    assert CliRunner().invoke(app, ["store", "rm", str(folder), "--namespace", "one"], input="n\n").exit_code == 1
    assert call("rm", folder, "--namespace", "one", "--group", "search@1", "--yes") == "2 removed\n"
    assert call("rm", folder, "--namespace", "one", "--content", sample(0)[0].content[:20], "--yes") == "1 removed\n"
    with DiskStore(folder) as store:
        assert [holds(store, n) for n in range(4)] == [False, False, True, False]
    assert json.loads(call("rm", folder, "--namespace", "one", "--yes", "--json")) == {"removed": 1}
    with DiskStore(folder) as store:
        assert list(store.entries(ONE)) == []


def test_sealed_needs_its_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    with DiskStore(tmp_path / "s", keyring=Keyring(b"k" * 32)) as store:
        store.put(*sample(1))
    assert len(json.loads(call("ls", tmp_path / "s", "--json", "--key-file", key))) == 1
    call("ls", tmp_path / "s", status=2)
    call("ls", tmp_path, status=2)


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, kvcomm.cli; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
