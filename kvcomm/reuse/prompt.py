"""A prompt is an ordered list of labelled segments; its token ids are the segments' ids joined."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvcomm.checks import need, need_all
from kvcomm.errors import InvalidInput
from kvcomm.types import TOKEN_BYTES, Segment, digest_fields, pack_tokens


@dataclass(frozen=True)
class Part:
    """A segment at its place.

    Attributes:
        segment: the token ids.
        label: the place, ``agent/slot`` or ``agent/#n`` for the n-th fixed text; what an offset is learned for.

    Raises:
        InvalidInput: one of the two is of another type.
    """

    segment: Segment
    label: str

    def __post_init__(self) -> None:
        need(self.segment, Segment, "segment", "pass a Segment, made of token ids")
        need(self.label, str, "label", "pass the name of a place as text")


@dataclass(frozen=True)
class Prompt:
    """Parts in order. Dense and reused runs see the same ids, since both see these.

    Attributes:
        grows: whether later prompts are expected to begin with this one, as the turns of a conversation do: the KV of
            every part, and of the answer, is then kept as it stands here, whatever else is held of the same text.

    Raises:
        InvalidInput: the prompt has no tokens, or a part is no Part.
    """

    parts: tuple[Part, ...]
    grows: bool = False

    def __post_init__(self) -> None:
        need_all(self.parts, Part, "parts", "pass a tuple of Part")
        if not any(len(part.segment) for part in self.parts):
            raise InvalidInput("the prompt has 0 tokens; give it at least one")

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All ids, in order."""
        return tuple(token for part in self.parts for token in part.segment.token_ids)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each part's first token."""
        found, at = [], 0
        for part in self.parts:
            found.append(at)
            at += len(part.segment)
        return tuple(found)

    @cached_property
    def preceding(self) -> tuple[str, ...]:
        """For each part the content digest of all ids before it."""
        packed = pack_tokens(self.token_ids)
        return tuple(digest_fields(b"tokens", packed[: start * TOKEN_BYTES]) for start in self.starts)

    def __len__(self) -> int:
        return len(self.token_ids)
