"""Runs a program that nobody has read: in a process of its own, with limits, without network or environment.

Two ways to keep it in, and the outcome says which was in force:

- ``namespaces``: a root file system of its own that holds only the Python installation, read-only, and an empty
  working folder in memory; no network, no other processes in sight; everything in it dies with it. The kernel enforces
  this.
- ``audit hook``: where the kernel refuses namespaces. An audit hook inside the process refuses sockets, other
  processes, foreign code and changes to files outside a temporary folder. It stops accidents, not an attacker.

A program passes only if it runs to its end: the driver then hands back a token, so an early exit with status 0 does
not count. A program that was written to search its own process for that token could forge a pass.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, cast

Status = Literal["passed", "failed", "timed out", "refused"]
Isolation = Literal["namespaces", "audit hook", "none"]

MAX_PROGRAM_BYTES = 1 << 20
_MAX_REPORT_BYTES = 1 << 16
_HERE = Path(__file__).parent
_NO_NAMESPACES = 71


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
        status: ``passed``, ``failed``, ``timed out`` (wall or CPU) or ``refused`` (it was not run).
        reason: one line; empty for ``passed``.
        isolation: what kept it in.
        wall_s: seconds from start to end, the interpreter's start included.
    """

    status: Status
    reason: str
    isolation: Isolation
    wall_s: float


def run_program(
    program: str, limits: Limits | None = None, isolation: Literal["auto", "namespaces", "audit hook"] = "auto"
) -> Outcome:
    """Run ``program`` as ``__main__`` and say whether it came to its end.

    Args:
        program: Python source.
        limits: Limits() if not given.
        isolation: ``auto`` takes namespaces where the kernel allows them. ``namespaces`` refuses to run without.
    """
    limits = limits or Limits()
    size = len(program.encode("utf-8", "replace"))
    if size > MAX_PROGRAM_BYTES:
        return Outcome("refused", f"{size} bytes of program, the limit is {MAX_PROGRAM_BYTES}", "none", 0.0)
    if not sys.platform.startswith("linux"):
        return Outcome("refused", f"limits are not enforced on {sys.platform}; run it on Linux", "none", 0.0)
    if isolation != "audit hook":
        outcome = _attempt(program, limits, "namespaces")
        if outcome.status != "refused" or isolation == "namespaces":
            return outcome
    return _attempt(program, limits, "audit hook")


def _attempt(program: str, limits: Limits, isolation: Literal["namespaces", "audit hook"]) -> Outcome:
    token = secrets.token_hex(16)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcomm-sandbox-", ignore_cleanup_errors=True) as folder:
        settings = {**asdict(limits), "isolation": isolation, "folder": folder, "driver": _driver()}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_HERE / "sandbox_launch.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C.UTF-8"},
            cwd=folder,
            start_new_session=True,
        )
        try:
            job = json.dumps({"program": program, "token": token}).encode()
            report = _exchange(process, job, start + limits.wall_s)
        finally:
            _kill(process)
    return _judge(report, token, process.returncode, isolation, time.monotonic() - start)


def _driver() -> str:
    return (_HERE / "sandbox_driver.py").read_text(encoding="utf-8")


def _exchange(process: subprocess.Popen[bytes], job: bytes, deadline: float) -> bytes | None:
    """Send the job, read the report to its end; ``None`` when the deadline passes first."""
    received = bytearray()
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with selectors.DefaultSelector() as selector:
        for stream, event in ((stdin, selectors.EVENT_WRITE), (stdout, selectors.EVENT_READ)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)
        while selector.get_map() and len(received) < _MAX_REPORT_BYTES:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                if key.fileobj is stdout:
                    block = os.read(stdout.fileno(), 4096)
                    received += block
                    if not block:
                        selector.unregister(stdout)
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


def _judge(report: bytes | None, token: str, status: int, isolation: Isolation, wall_s: float) -> Outcome:
    if report is None:
        return Outcome("timed out", "the limit of wall time passed", isolation, wall_s)
    if status == _NO_NAMESPACES:
        reason = report.decode(errors="replace") or "the kernel refused"
        return Outcome("refused", f"no namespaces here: {reason[:300]}", "none", wall_s)
    if status in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return Outcome("timed out", "the limit of CPU time passed", isolation, wall_s)
    try:
        said = json.loads(report)
        if said["token"] == token and said["ok"] is True:
            return Outcome("passed", "", isolation, wall_s)
        reason = str(said["reason"])[:300] if said["token"] == token else "a report without the token"
    except (ValueError, KeyError, TypeError):
        reason = f"it ended before its tests did (exit status {status})"
    return Outcome("failed", reason, isolation, wall_s)
