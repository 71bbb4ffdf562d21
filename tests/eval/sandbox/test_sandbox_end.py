"""The sandbox when its evaluator ends or stops: nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eval.sandbox.program import Way


def sandboxed(pid: int) -> set[int]:
    """Processes below ``pid``."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {pid}


def start_sleeper(isolation: Way, wall_s: float, folder: Path) -> tuple[subprocess.Popen[bytes], set[int]]:
    """An evaluator whose program sleeps, and the processes below it."""
    code = (
        "from eval.sandbox.program import Limits, run_program\n"
        f"run_program('import time; time.sleep(60)', Limits(wall_s={wall_s}), {isolation!r})"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder)}
    evaluator = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment)
    wanted, deadline = 4 if isolation == "namespaces" else 3, time.monotonic() + 15
    while len(below := sandboxed(evaluator.pid)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) == wanted
    time.sleep(0.3)
    return evaluator, below


def gone(processes: set[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


def test_all_ends_with_an_evaluator_that_is_killed(isolation: Way, tmp_path: Path) -> None:
    evaluator, below = start_sleeper(isolation, wall_s=30, folder=tmp_path)
    evaluator.kill()
    evaluator.wait()
    assert gone(below, 5)
    assert not list(tmp_path.iterdir())


def test_the_wall_limit_holds_without_an_evaluator_that_looks(isolation: Way, tmp_path: Path) -> None:
    evaluator, below = start_sleeper(isolation, wall_s=8, folder=tmp_path)
    try:
        evaluator.send_signal(signal.SIGSTOP)
        launcher = min(below)
        deadline = time.monotonic() + 20
        while sandboxed(evaluator.pid) != {launcher} and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not sandboxed(launcher)  # the launcher itself is a zombie until the evaluator looks
    finally:
        evaluator.kill()
        evaluator.wait()
