"""Fixtures shared by all tests. The one real model is loaded once a session."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct, float32, CPU. Treat as read-only."""
    from eval.models.default import load

    return load(None)
