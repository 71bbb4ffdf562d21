"""The audit log: a durable line for each act, no content, bounded files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.serve.audit import AuditLog
from kvcomm.transfer.auth import Grant


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_an_act(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", clock=lambda: 12.3456)
    log.write("delete_namespace", "0a" * 8, "one", entries=3)
    log.write("service_start", "local", address="[::1]:7080")
    log.admin("delete_group", Grant("one", frozenset({"admin"}), "0b" * 8), {"entries": 1})
    assert lines(log.path)[2]["who"] == "0b" * 8
    assert lines(log.path)[:2] == [
        {"time": 12.346, "act": "delete_namespace", "who": "0a" * 8, "namespace": "one", "entries": 3},
        {"time": 12.346, "act": "service_start", "who": "local", "namespace": "", "address": "[::1]:7080"},
    ]
    assert log.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "arguments",
    [
        {"act": "made.up"},
        {"text": "the prompt"},
        {"reason": 'line\n{"act":"forged"}'},
        {"reason": "x" * 129},
        {"reason": "\x1b[2J"},
        {"reason": "two words"},
        {"who": "a\nb"},
    ],
)
def test_what_is_not_on_the_list_is_refused(tmp_path: Path, arguments: dict[str, str]) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    with pytest.raises(InvalidInput):
        log.write(**{"act": "token_create", "who": "local", **arguments})
    assert not log.path.exists()


def test_a_line_is_synced_before_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, synced = AuditLog(tmp_path / "audit.jsonl"), []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    log.write("service_start", "local")
    assert synced == [str(log.path), str(tmp_path)]
    log.write("service_stop", "local")
    assert synced[2:] == [str(log.path)]

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreUnavailable):
        log.write("service_start", "local")


def test_a_line_cut_short_by_a_crash_stays_alone(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("service_start", "local")
    with open(log.path, "a") as file:
        file.write('{"time":1,"act":"serv')
    log.write("service_stop", "local")
    first, cut, last = log.path.read_text().splitlines()
    assert json.loads(first)["act"] == "service_start" and json.loads(last)["act"] == "service_stop"
    assert cut == '{"time":1,"act":"serv'


def test_files_are_bounded_and_nothing_recent_is_lost(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=4096, keep=2)
    for number in range(300):
        log.write("delete", "local", "one", count=number)
    files = [log.path.with_name(f"audit.jsonl{end}") for end in (".2", ".1", "")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*(p.name for p in files), "audit.jsonl.lock"])
    assert all(p.stat().st_size <= 4096 for p in files)
    counts = [line["count"] for path in files for line in lines(path)]
    assert counts == list(range(counts[0], 300)) and len(counts) > 80


def test_processes_share_a_log(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvcomm.serve.audit import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]), max_bytes=4096, keep=20)\n"
        "for n in range(60): log.write('delete', sys.argv[2], count=n)"
    )
    path = tmp_path / "audit.jsonl"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in ("a", "b")]
    assert [p.wait(timeout=240) for p in running] == [0, 0]
    logs = [p for p in tmp_path.iterdir() if p.suffix != ".lock"]
    found = [(line["who"], line["count"]) for p in logs for line in lines(p)]
    assert sorted(found) == sorted((who, n) for who in "ab" for n in range(60))


def test_limits_are_checked(tmp_path: Path) -> None:
    for limits in ({"max_bytes": 100}, {"keep": 0}):
        with pytest.raises(InvalidInput):
            AuditLog(tmp_path / "a", **limits)
