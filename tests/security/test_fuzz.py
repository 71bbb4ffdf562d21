"""The short form of tests.soak.fuzz, and the refusals again under ``python -O``, where no assert is left."""

import os
import subprocess
import sys

import pytest

from tests.soak.fuzz import fuzz, targets


@pytest.mark.parametrize("name", ["frame", "entry", "sums", "token", "message"])
def test_only_typed_errors_come_out(name: str) -> None:
    with targets() as found:
        counts = fuzz(found[name], 0.6, seed=20)
    assert counts["tried"] > 20


@pytest.mark.slow
def test_refusals_hold_without_asserts() -> None:
    """Every refusal is asserted in a process with asserts in the tests alone: pytest rewrites those, -O drops ours."""
    command = [
        sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore",
        "tests/transfer/test_frame.py", "-k", "broken or refused or bit or hello",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ})
    assert done.returncode == 0, done.stdout[-3000:]
