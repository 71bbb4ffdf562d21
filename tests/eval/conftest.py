"""Ways to keep a program in; a test of one that this kernel or container has not is skipped, with what it said."""

from __future__ import annotations

import pytest

from eval.sandbox.program import Limits, Way, run_program


@pytest.fixture(params=["namespaces", "audit hook"])
def isolation(request: pytest.FixtureRequest) -> Way:
    """Each way in turn."""
    way: Way = request.param
    return _there(way)


@pytest.fixture(scope="session")
def namespaces() -> Way:
    """The stronger way alone."""
    return _there("namespaces")


def _there(way: Way) -> Way:
    outcome = run_program("", Limits(wall_s=20.0, cpu_s=10), way)
    if outcome.status == "refused":
        pytest.skip(outcome.reason)
    return way
