"""Names of stored KV. A key cannot be built without a namespace and a fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvcomm.types import ModelFingerprint, Namespace, Segment, digest_fields

Origin = Literal["prompt", "decode", "isolated"]


@dataclass(frozen=True)
class Recipe:
    """How a base was computed: whatever would make its KV another one for the same tokens.

    Attributes:
        origin: ``prompt`` (cut out of a prefill), ``decode`` (written by an agent) or ``isolated`` (alone behind a
            short neutral prefix that was cut off).
        context: label of the place it was captured in, ``agent/slot``; for ``isolated`` the empty string.
        preceding: content digest of all token ids that stood before it, from position 0.
        exact: whether everything before it, and itself, was computed without approximation.
    """

    origin: Origin
    context: str
    preceding: str
    exact: bool

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex digest over all fields."""
        exact = b"exact" if self.exact else b"approximate"
        return digest_fields(b"recipe", self.origin.encode(), self.context.encode(), self.preceding.encode(), exact)


@dataclass(frozen=True)
class CacheKey:
    """Identity of one stored base: (namespace, fingerprint, content, recipe).

    Two keys are equal exactly when all four are; ``digest`` is SHA-256 over the length-prefixed fields.
    """

    namespace: Namespace
    fingerprint: ModelFingerprint
    content: str
    recipe: Recipe

    @classmethod
    def of(cls, namespace: Namespace, fingerprint: ModelFingerprint, segment: Segment, recipe: Recipe) -> CacheKey:
        """The key of ``segment``'s base computed by ``recipe``."""
        return cls(namespace, fingerprint, segment.digest, recipe)

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex digest, 64 characters; safe as a file name."""
        return digest_fields(
            b"kvcomm-key-1",
            self.namespace.name.encode(),
            self.fingerprint.digest.encode(),
            self.content.encode(),
            self.recipe.digest.encode(),
        )

    def __str__(self) -> str:
        return f"{self.namespace}/{self.digest[:16]}"
