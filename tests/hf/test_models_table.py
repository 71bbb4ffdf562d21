"""docs/models.md says what the tests show: each family named, each table current."""

from __future__ import annotations

from tests.hf.models_table import DOC, current
from tests.tiny_models import FAMILIES, INTERLEAVED, KNOWN_AS, OWN_ATTENTION, WITHOUT_ROPE


def test_every_family_has_a_name() -> None:
    assert list(KNOWN_AS) == list(FAMILIES)
    assert INTERLEAVED | OWN_ATTENTION | set(WITHOUT_ROPE) <= set(FAMILIES)


def test_the_tables_are_current() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert current(text) == text, "run python -m tests.hf.models_table"
