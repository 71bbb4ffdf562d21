"""The sandbox against programs that were written to get out of it, or to pass without being right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval.sandbox import program as sandbox
from eval.sandbox.landlock import version as landlock_version
from eval.sandbox.program import Check, Limits, Outcome, Way, run_program
from eval.sandbox.seccomp import filter_program

LIMITS = Limits(wall_s=20.0, cpu_s=10)
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    result = libc.syscall(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), 'refused')
"""


def run(program: str, isolation: Way, tests: Check | None = None) -> Outcome:
    outcome = run_program(program, LIMITS, isolation, tests)
    assert outcome.isolation == isolation
    return outcome


@pytest.mark.parametrize("status", [1, 71, 124])
def test_no_exit_status_changes_the_isolation(status: int, isolation: Way) -> None:
    outcome = run(f"import os; os._exit({status})", isolation)
    assert outcome.status == "failed" and f"exit status {status}" in outcome.reason


def test_a_program_is_never_root(isolation: Way) -> None:
    assert run("import os; assert 0 not in (*os.getresuid(), *os.getresgid(), *os.getgroups())", isolation).reason == ""


@pytest.mark.skipif(filter_program(True) is None, reason="no filter for this architecture")
@pytest.mark.parametrize(
    "args",
    [
        "{'x86_64': 29, 'aarch64': 194}[m], 0, 2**30, 0o1600",  # shmget
        "{'x86_64': 319, 'aarch64': 279}[m], b'x', 0",  # memfd_create
        "{'x86_64': 41, 'aarch64': 198}[m], 40, 1, 0",  # socket, AF_VSOCK
        "{'x86_64': 41, 'aarch64': 198}[m], 16, 3, 0",  # AF_NETLINK
        "{'x86_64': 53, 'aarch64': 199}[m], 1, 1, 0, b'0' * 8",  # socketpair, whose buffers no limit counts
        "{'x86_64': 101, 'aarch64': 117}[m], 0, 0, 0, 0",  # ptrace
        "{'x86_64': 272, 'aarch64': 97}[m], 0x10000000",  # unshare
        "{'x86_64': 56, 'aarch64': 220}[m], 0x10000011, 0, 0, 0, 0",  # clone into a user namespace
        "{'x86_64': 157, 'aarch64': 167}[m], 1, 0, 0, 0, 0",  # prctl that forgets the parent
        "{'x86_64': 250, 'aarch64': 219}[m], 0, -3, 1",  # keyctl
        "425, 8, b'0' * 120",  # io_uring_setup
        "434, 1, 0",  # pidfd_open
        "{'x86_64': 278, 'aarch64': 75}[m], 1, 0, 0, 8",  # vmsplice, a byte of which holds a huge page
        "{'x86_64': 141, 'aarch64': 140}[m], 0, 0, 0",  # setpriority
        "{'x86_64': 203, 'aarch64': 122}[m], 0, 8, b'1234567'",  # sched_setaffinity
        "{'x86_64': 73, 'aarch64': 32}[m], 0, 2",  # flock
        "{'x86_64': 72, 'aarch64': 25}[m], 0, 1024, 0",  # fcntl, a lease
    ],
)
def test_calls_that_limits_do_not_cover_are_refused(args: str, namespaces: Way) -> None:
    program = f"import platform\nm = platform.machine()\n{CALL}\ncall({args})"
    outcome = run(program, namespaces)
    assert outcome.status == "failed" and "[Errno 1]" in outcome.reason, outcome


@pytest.mark.skipif(filter_program(True) is None, reason="no filter for this architecture")
def test_calls_of_newer_kernels_are_not_there(namespaces: Way) -> None:
    for number in (463, 467, 500):  # setxattrat, open_tree_attr, none yet
        assert "[Errno 38]" in run(f"{CALL}\ncall({number}, -100, b'/', 0, 0, 0)", namespaces).reason
    fcntl = "import fcntl; assert fcntl.fcntl(0, fcntl.F_GETFD) is not None"
    assert run(fcntl, namespaces).reason == ""


def test_the_hook_refuses_modules_under_borrowed_names() -> None:
    lie = (
        "import _imp, sys, types\nclass S(str):\n    def split(self, *a): return ['json']\n"
        "import math\npath = {path}\n"
        "_imp.create_dynamic(types.SimpleNamespace(name={name}, origin={origin}))"
    )
    path = "sys.base_prefix + '/lib/python3/lib-dynload/_ctypes.so'"
    for name, origin in (("S('_ctypes')", "path"), ("'json'", "S(path)"), ("S('_ctypes')", "S(path)")):
        outcome = run(lie.format(path=path, name=name, origin=origin), "audit hook")
        assert "PermissionError: the sandbox refuses" in outcome.reason, outcome


@pytest.mark.skipif(not os.access("/proc/sys/kernel/shmmni", os.W_OK) or os.getuid() != 0, reason="sysctls are fixed")
def test_shared_memory_is_refused_without_a_filter_too(namespaces: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("/proc/sys/kernel/shmmni").read_text()
    monkeypatch.setattr("eval.sandbox.program.filter_program", lambda namespaces: None)
    program = f"import ctypes\n{CALL}\nif libc.shmget(0, 4096, 0o1600) < 0: raise OSError(ctypes.get_errno(), '')"
    assert "OSError: [Errno" in run(program, namespaces).reason
    assert Path("/proc/sys/kernel/shmmni").read_text() == before


def test_the_filter_knows_two_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        kernel, alone = filter_program(True, machine), filter_program(False, machine)
        assert kernel and alone and len(kernel) < len(alone) and len(alone) % 8 == 0
    assert filter_program(True, "riscv64") is None


@pytest.mark.parametrize(
    "answer",
    [
        "class All:\n    def __eq__(self, other): return True\ndef f(x): return All()",
        "class All(list):\n    def __eq__(self, other): return True\ndef f(x): return All()",
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for scope in (frame.f_locals, "
        "frame.f_globals):\n            assert 'token' not in scope and 'tests' not in (scope.get('job') or ())\n"
        "        frame = frame.f_back",
        "import gc, os\ndef f(x):\n    os.kill(os.getppid(), 9)",
        'import os\ndef f(x):\n    for n in range(64):\n        try: os.write(n, b\'ready\\n{"status": "passed"}\')\n'
        "        except OSError: pass\n    return x",
        "def f(x): return (i for i in [x])",
        "f = 1",
        "def g(x): return [x]",
        "def f(x):\n    v = []\n    v.append(v)\n    return v",
    ],
)
def test_wrong_answers_do_not_pass_by_force(answer: str, isolation: Way) -> None:
    outcome = run(answer, isolation, Check("def check(f):\n    assert f(1) == [1]", "f"))
    assert outcome.status == "failed", outcome


def test_values_keep_their_exact_types(isolation: Way) -> None:
    values = (
        "None, True, 1, -2**70, 1.5, float('inf'), 2j, 'ü\\ud800', b'x', bytearray(b'y'), [1, (2,)], {(1, 2): {3}}, "
        "frozenset({4})"
    )
    source = (
        f"def check(f):\n    for v in [{values}]:\n        w = f(v)\n        assert type(w) is type(v) and w == v, v\n"
        "    assert f(x=[3]) == [3]"
    )
    assert run("def f(x): return x", isolation, Check(source, "f")).reason == ""
    plain = "from collections import Counter\ndef f(x): return Counter(x)"
    assert run(plain, isolation, Check("def check(f):\n    assert type(f('aab')) is dict", "f")).reason == ""


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.mkfifo({path!r})",
        "import os; os.mknod({path!r})",
        "import sqlite3; sqlite3.connect({path!r})",
        "import readline; readline.write_history_file({path!r})",
        "import os; os.fchmod(os.open({victim!r}, os.O_RDONLY), 0o777)",
        "f = open({victim!r}); import os; os.fchmod(f.fileno(), 0o777)",
        "import signal, os; signal.pidfd_send_signal(os.pidfd_open({pid}), 0)",
        "open('/proc/{pid}/environ', 'rb').read()",
        "open('/proc/{pid}/mem', 'rb')",
        "import os; open('/proc/%d/environ' % os.getppid(), 'rb').read()",
        "open('../../../../../../proc/{pid}/environ', 'rb')",
        "import os; os.listdir('/proc/{pid}')",
        "import os; os.symlink('/proc', 'p'); open('p/{pid}/environ', 'rb')",
        "import os; os.open(os.path.dirname({victim!r}), os.O_RDONLY | os.O_DIRECTORY)",
        "open({victim!r}, 'rb')",
        "import os.path, sys\nfor m in (os.path, sys.modules['posixpath']): m.realpath = lambda p, **k: os.getcwd()\n"
        "import os; os.fsdecode = lambda p: os.getcwd(); open({path!r}, 'w')",
        "import sys\ntry: open({path!r}, 'w')\nexcept OSError as error:\n    frame = error.__traceback__\n"
        "    while frame:\n        for name in list(frame.tb_frame.f_globals):\n"
        "            if name.startswith('_') and name[1:].isupper(): frame.tb_frame.f_globals[name] = ()\n"
        "        frame = frame.tb_next\nimport builtins; builtins.isinstance = lambda *a: False; open({path!r}, 'w')",
    ],
)
def test_files_and_processes_outside_are_out_of_reach(program: str, isolation: Way, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x")
    tmp_path.chmod(0o777)
    outcome = run(program.format(path=str(tmp_path / "new"), victim=str(victim), pid=os.getpid()), isolation)
    assert outcome.status == "failed", outcome
    assert list(tmp_path.iterdir()) == [victim] and victim.stat().st_mode & 0o777 != 0o777


@pytest.mark.parametrize(
    "program",
    [
        "open({path!r}, 'w')",
        "open({victim!r})",
        "import os; os.remove({victim!r})",
        "open('/proc/{pid}/environ', 'rb')",
        "import os; os.kill({pid}, 0)",
        "import os; os.fork()",
        "import socket; socket.socket()",
    ],
)
def test_the_kernel_holds_a_program_that_got_past_the_hook(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not landlock_version():
        pytest.skip("no Landlock")
    source = sandbox._source
    monkeypatch.setattr(sandbox, "_source", lambda name: source(name).replace("  install_hook(sys", "  print(sys"))
    assert run("import os; os.lstat('/'); import sqlite3", "audit hook").reason == ""
    victim = tmp_path / "victim"
    victim.touch()
    outcome = run(program.format(path=str(tmp_path / "new"), victim=str(victim), pid=os.getpid()), "audit hook")
    assert "PermissionError: [Errno" in outcome.reason, outcome
