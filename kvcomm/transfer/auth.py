"""What a connection may do, decided once by its token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grant:
    """The one namespace that a connection sees, and of ``read``, ``write`` and ``admin`` what it may do there."""

    namespace: str
    rights: frozenset[str]
