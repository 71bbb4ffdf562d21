"""``kvcomm anchors token``: what is printed, in 80 columns, and what never is."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcomm.serve.token_cli import app
from kvcomm.serve.tokens import TokenFile
from kvcomm.transfer.auth import Token

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


def make(folder: Path, *more: str) -> Token:
    done = runner.invoke(app, ["create", str(folder), "--namespace", "one", "--right", "read", *more])
    assert done.exit_code == 0, done.output
    return Token.parse(done.stdout.strip())


def test_create_list_revoke(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    token = make(folder, "--right", "write", "--expires", "30d", "--note", "agents [red]of[/red] the night shift")
    with TokenFile(folder / "tokens.sqlite") as file:
        assert file.check(token).rights == {"read", "write"}
    listed = runner.invoke(app, ["list", str(folder)])
    assert listed.exit_code == 0
    assert token.identity in listed.stdout and "active" in listed.stdout and "[red]" in listed.stdout
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert token.secret not in listed.stdout
    assert runner.invoke(app, ["revoke", str(folder), token.identity]).exit_code == 0
    assert runner.invoke(app, ["revoke", str(folder), token.identity]).exit_code == 1
    rows = json.loads(runner.invoke(app, ["list", str(folder), "--json"]).stdout)
    assert [(r["id"], r["state"]) for r in rows] == [(token.identity, "revoked")]
    assert runner.invoke(app, ["purge", str(folder)]).stdout == "1 dropped\n"
    acts = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert [a["act"] for a in acts] == ["token_create", "token_revoke", "token_revoke", "token_purge"]
    assert token.secret not in (folder / "audit.jsonl").read_text()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "token"
    arguments = ["create", str(tmp_path), "--namespace", "one", "--right", "admin", "--out", str(out)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0 and "kvc_" not in done.output
    assert out.stat().st_mode & 0o777 == 0o600
    Token.parse(out.read_text().strip())
    assert runner.invoke(app, arguments).exit_code == 2  # an existing file is not overwritten, and no token is made
    assert len(json.loads(runner.invoke(app, ["list", str(tmp_path), "--json"]).stdout)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--namespace", "../x", "--right", "read"],
        ["--namespace", "one", "--right", "root"],
        ["--namespace", "one", "--right", "read", "--expires", "soon"],
        ["--namespace", "one"],
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str]) -> None:
    done = runner.invoke(app, ["create", str(tmp_path), *arguments])
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_no_folder(tmp_path: Path) -> None:
    done = runner.invoke(app, ["list", str(tmp_path / "absent")])
    assert done.exit_code == 2 and "token create" in done.stderr
    assert runner.invoke(app, ["revoke", str(tmp_path), "kvc_secret"]).exit_code == 2


def test_long_names_stay_within_80_columns(tmp_path: Path) -> None:
    long = "n" * 128
    for right in ("read", "admin"):
        arguments = ["create", str(tmp_path), "--namespace", long, "--right", right, "--right", "write"]
        assert runner.invoke(app, [*arguments, "--note", "x" * 80]).exit_code == 0
    listed = runner.invoke(app, ["list", str(tmp_path)]).stdout
    assert max(map(len, listed.splitlines())) <= 80
    assert listed.count("n") >= 256
