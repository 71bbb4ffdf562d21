"""Runs a program that nobody has read: in a process of its own, with limits, without network or environment.

Two ways to keep it in, and the outcome says which was in force:

- ``namespaces``: a root file system of its own that holds only the Python installation, read-only, and an empty
  working folder in memory; no network, no other processes in sight; everything in it dies with it. The kernel enforces
  this.
- ``audit hook``: for where the kernel refuses namespaces, and only when asked for by this name. An audit hook inside
  the process, and what limits the kernel lets any process lay on itself. It stops accidents; see docs/evaluation.md.

Tests run in another process than the program (eval/sandbox/tester.py) and see plain values only, so that a program
passes only if its function returns the right ones. Without tests a program passes if it runs to its end, which is then
its own word.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, cast

from eval.sandbox.seccomp import filter_program

Status = Literal["passed", "failed", "timed out", "refused"]
Isolation = Literal["namespaces", "audit hook", "none"]
Way = Literal["namespaces", "audit hook"]

MAX_PROGRAM_BYTES = 1 << 20
_MAX_REPORT_BYTES = 1 << 16
_HERE = Path(__file__).parent
_READY = b"ready\n"
_TIMED_OUT = 124


@dataclass(frozen=True)
class Limits:
    """What one program may use. Memory is address space for each process."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    file_bytes: int = 8 * 2**20


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        status: ``passed``, ``failed``, ``timed out`` (wall or CPU) or ``refused`` (the sandbox did not stand: it
            says nothing about the program).
        reason: one line; empty for ``passed``.
        isolation: what kept it in.
        wall_s: seconds from start to end, the interpreter's start included.
    """

    status: Status
    reason: str
    isolation: Isolation
    wall_s: float


@dataclass(frozen=True)
class Check:
    """Trusted source that defines ``check(candidate)``, and the program's function that it is about."""

    source: str
    function: str


def run_program(
    program: str, limits: Limits | None = None, isolation: Way = "namespaces", tests: Check | None = None
) -> Outcome:
    """Run ``program`` as ``__main__``, then the tests, and say whether all came to its end.

    Args:
        program: Python source.
        limits: Limits() if not given.
        isolation: what keeps it in; where that is not to be had nothing is run, and the outcome is ``refused``.
        tests: run in a process of their own; their ``candidate`` takes and returns builtin values, as copies.
    """
    limits = limits or Limits()
    size = len(program.encode("utf-8", "replace"))
    if size > MAX_PROGRAM_BYTES:
        return Outcome("failed", f"{size} bytes of program, the limit is {MAX_PROGRAM_BYTES}", "none", 0.0)
    if not sys.platform.startswith("linux"):
        return Outcome("refused", f"limits are not enforced on {sys.platform}; run it on Linux", "none", 0.0)
    job = {"program": program, "tests": tests.source if tests else "", "function": tests.function if tests else ""}
    start = time.monotonic()
    with ExitStack() as stack:
        folder = ""
        if isolation == "audit hook":
            made = tempfile.TemporaryDirectory(prefix="kvcomm-sandbox-", ignore_cleanup_errors=True)
            folder = os.path.realpath(stack.enter_context(made))
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-B",
                "-c",
                _source("launch"),
                json.dumps(_settings(limits, isolation, folder)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C.UTF-8"},
            cwd=folder or "/",
            start_new_session=True,
        )
        try:
            report = _exchange(process, json.dumps(job).encode(), start + limits.wall_s)
        finally:
            _kill(process)
    return _judge(report, process.returncode, isolation, time.monotonic() - start)


def _settings(limits: Limits, isolation: Way, folder: str) -> dict[str, object]:
    calls = filter_program(namespaces=isolation == "namespaces") or b""
    sources = {"driver": _source("driver"), "tester": _source("tester")}
    about = {"isolation": isolation, "folder": folder, "parent": os.getpid(), "filter": calls.hex()}
    return {**asdict(limits), **about, **sources}


def _source(name: str) -> str:
    """A part of the sandbox as one text, with what it imports of the others: inside, there are no files of ours."""
    needed = {"launch": ("root", "landlock"), "driver": ("wire", "hook"), "tester": ("wire",)}[name]
    text = "import sys, types\n"
    for module in needed:
        inner = (_HERE / f"{module}.py").read_text(encoding="utf-8")
        text += f"part = sys.modules['eval.sandbox.{module}'] = types.ModuleType('part')\nexec({inner!r}, vars(part))\n"
    return text + (_HERE / f"{name}.py").read_text(encoding="utf-8")


def _exchange(process: subprocess.Popen[bytes], job: bytes, deadline: float) -> bytes | None:
    """Send the job once the sandbox stands, read the report to its end; ``None`` when the deadline passes meanwhile.

    Nothing, where it passes before the sandbox stands.
    """
    received = bytearray()
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with selectors.DefaultSelector() as selector:
        for stream in (stdin, stdout):
            os.set_blocking(stream.fileno(), False)
        selector.register(stdout, selectors.EVENT_READ)
        while selector.get_map() and len(received) < _MAX_REPORT_BYTES:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None if received.startswith(_READY) else b""
            for key, _ in ready:
                if key.fileobj is stdout:
                    block = os.read(stdout.fileno(), 4096)
                    was_ready = received.startswith(_READY)
                    received += block
                    if not block:
                        selector.unregister(stdout)
                    elif not was_ready and received.startswith(_READY):
                        selector.register(stdin, selectors.EVENT_WRITE)
                    continue
                try:
                    job = job[os.write(stdin.fileno(), job) :]
                except BrokenPipeError:
                    job = b""
                if not job:
                    selector.unregister(stdin)
                    stdin.close()
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return bytes(received)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its group; inside namespaces all others die with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            stream.close()


def _judge(report: bytes | None, status: int, isolation: Way, wall_s: float) -> Outcome:
    """Read the report, which the program has no way to write; nothing of the program ran before ``ready``."""
    if report is None or (status == _TIMED_OUT and report.startswith(_READY)):
        return Outcome("timed out", "the limit of wall time passed", isolation, wall_s)
    if not report.startswith(_READY):
        reason = report.decode(errors="replace")[:300] or f"it does not start in time (exit status {status})"
        return Outcome("refused", f"no {isolation} here: {reason}", "none", wall_s)
    try:
        said = json.loads(report.removeprefix(_READY))
        return Outcome(cast(Status, said["status"]), said["reason"], isolation, wall_s)
    except ValueError:
        return Outcome("failed", f"it ended before its tests did (exit status {status})", isolation, wall_s)
