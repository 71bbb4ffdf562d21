"""Backends over the tiny models, with a tokenizer that only counts."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvcomm.hf.backend import HFBackend
from tests.tiny_models import FAMILIES

VOCABULARY = 128


class CountingTokenizer:
    """As much of a tokenizer as a fingerprint needs: 128 words named by their ids."""

    special_tokens_map: dict[str, str] = {}

    def __len__(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {str(n): n for n in range(VOCABULARY)}


def backend_of(model: Any) -> HFBackend:
    """A backend of its own."""
    return HFBackend(model, CountingTokenizer(), weights="tiny")  # type: ignore[arg-type]


@cache
def tiny_backend(family: str) -> HFBackend:
    """The family's backend with sdpa attention, shared by tests that leave it as it is."""
    return backend_of(FAMILIES[family]())
