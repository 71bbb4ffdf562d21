"""The short form of tests.soak.fuzz, and the refusals again under ``python -O``, where no assert is left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.fuzz import fuzz, targets


@pytest.mark.parametrize("name", ["frame", "entry", "sums", "token", "message"])
def test_only_typed_errors_come_out(name: str) -> None:
    with targets() as found:
        counts = fuzz(found[name], 0.6, seed=20)
    assert counts["tried"] > 20


@pytest.mark.slow
def test_refusals_hold_without_asserts(tmp_path: Path) -> None:
    """pytest makes the tests' own asserts into code, so that they hold; all others are gone. The canary shows it."""
    canary = tmp_path / "test_canary.py"
    canary.write_text("def test_it():\n    assert False\n")
    refusals = ["tests/transfer/test_frame.py", "-k", "broken or refused or bit or hello"]
    for what, status in (([str(canary)], 1), (refusals, 0)):
        command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == status, done.stdout[-3000:]
