"""The sandbox against programs that would do harm, both ways of keeping them in."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from eval.sandbox import program as sandbox
from eval.sandbox.program import MAX_PROGRAM_BYTES, Limits, Outcome, Way, run_program

LIMITS = Limits(wall_s=20.0, cpu_s=10)


def run(program: str, isolation: Way, limits: Limits = LIMITS) -> Outcome:
    outcome = run_program(program, limits, isolation)
    assert outcome.isolation == isolation
    return outcome


def test_a_program_that_ends_passes(isolation: Way) -> None:
    program = "import math, re, typing, collections, hashlib\nassert math.sqrt(4) == 2\nprint('x' * 100000)"
    assert run(program, isolation).status == "passed"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "before its tests did (exit status 0)"),
        ("import os; os.close(3); os._exit(0)", "before its tests did"),
        ("import os\nfor n in range(64):\n    try: os.write(n, b'{\"ok\": true}')\n    except OSError: pass", ""),
        ("input()", "EOFError"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(2**26))", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 10 * 2**30)", "Error"),
        ("f = []\nf.append(f.append)\ndef g(): g()\ng()", "RecursionError"),
    ],
)
def test_a_program_that_does_not_end_well_fails(program: str, reason: str, isolation: Way) -> None:
    outcome = run(program, isolation)
    assert outcome.status == "failed" and reason in outcome.reason, outcome


def test_a_loop_meets_the_limit_of_cpu(isolation: Way) -> None:
    outcome = run("while True: pass", isolation, Limits(wall_s=20.0, cpu_s=1))
    assert (outcome.status, outcome.reason) == ("timed out", "the limit of CPU time passed")


def test_a_loop_that_ignores_signals_meets_it_too(isolation: Way) -> None:
    stubborn = "import signal\nfor n in (signal.SIGXCPU, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
    for loop in ("while True: pass", "sum(range(10**13))"):
        outcome = run(stubborn + loop, isolation, Limits(wall_s=20.0, cpu_s=1))
        assert outcome.status in ("timed out", "failed") and outcome.wall_s < 19, outcome


def test_threads_and_spawned_processes_are_few(isolation: Way) -> None:
    threads = "import threading, time\nfor _ in range(500): threading.Thread(target=time.sleep, args=(60,)).start()"
    spawn = "import os\nfor _ in range(50): os.posix_spawn('/bin/sleep', ['sleep', '60'], {})"
    for program in (threads, spawn):
        assert run(program, isolation, Limits(wall_s=3.0)).status in ("failed", "timed out"), program


def test_a_sleep_meets_the_limit_of_wall_time(isolation: Way) -> None:
    start = time.monotonic()
    outcome = run("import time\ntime.sleep(60)", isolation, Limits(wall_s=1.0))
    assert (outcome.status, outcome.reason) == ("timed out", "the limit of wall time passed")
    assert time.monotonic() - start < 10


def test_forks_are_few_and_die_with_the_program(isolation: Way) -> None:
    outcome = run("import os\nwhile True: os.fork()", isolation)
    assert outcome.status == "failed" and "Error" in outcome.reason, outcome
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    orphan = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    '{mark}'\n    time.sleep(30)"
    assert run(orphan, isolation).wall_s < 15
    time.sleep(0.2)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in p.read_bytes().decode(errors="replace")]


def test_writes_outside_its_folder_fail(isolation: Way, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("unharmed")
    for program in (
        f"open({str(victim)!r}, 'w').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        f"import os; os.remove({str(victim)!r})",
        f"import os; os.rename({str(victim)!r}, {str(tmp_path / 'moved')!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import os; os.symlink({str(victim)!r}, 'link'); open('link', 'a').write('x')",
        "import os; open(os.path.join(os.path.dirname(os.__file__), 'kvcomm-evil'), 'w')",
    ):
        assert run(program, isolation).status == "failed", program
    assert victim.read_text() == "unharmed" and list(tmp_path.iterdir()) == [victim]


def test_its_own_folder_is_writable_within_bounds_and_removed(
    isolation: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("open('a', 'w').write('x'); assert open('a').read() == 'x'", isolation).status == "passed"
    big = "with open('a', 'wb') as f:\n    for _ in range(64): f.write(bytes(2**20)); f.flush()"
    assert run(big, isolation).status == "failed"
    assert not list(tmp_path.iterdir())


def test_sockets_reach_nobody(isolation: Way) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for program in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
            f"import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
        ):
            outcome = run(program, isolation)
            assert outcome.status == "failed", outcome
        with pytest.raises(TimeoutError):
            server.accept()


def test_environment_is_cleared(isolation: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMM_TEST_SECRET", "hidden")
    program = "import os; assert set(os.environ) <= {'LC_ALL', 'LC_CTYPE'}, sorted(os.environ)"
    assert run(program, isolation).reason == ""


def test_other_processes_and_foreign_code_are_out_of_reach(isolation: Way) -> None:
    for program in (f"import os; os.kill({os.getpid()}, 9)", "import subprocess; subprocess.run(['/bin/true'])"):
        assert run(program, isolation).status == "failed", program
    if isolation == "audit hook":
        assert run("import ctypes", isolation).status == "failed"
    else:
        assert run("open('/etc/passwd')", isolation).status == "failed"


def test_too_long_a_program_is_refused() -> None:
    outcome = run_program("#" * (MAX_PROGRAM_BYTES + 1))
    assert outcome.status == "failed" and str(MAX_PROGRAM_BYTES) in outcome.reason


def test_without_namespaces_nothing_is_run_unless_the_hook_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    source = sandbox._source
    monkeypatch.setattr(
        sandbox,
        "_source",
        lambda name: source(name).replace("            unshare()\n", "            raise OSError('x')\n"),
    )
    outcome = run_program("pass")
    assert (outcome.status, outcome.reason, outcome.isolation) == ("refused", "no namespaces here: x", "none")
    assert run_program("pass", isolation="audit hook").isolation == "audit hook"
