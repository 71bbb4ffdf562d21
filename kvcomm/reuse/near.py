"""Reusing KV of a nearly equal text: the runs in common are taken over, what differs is computed.

In the unrotated frame a key carries no position, so a base for the new text is gathered from the held one token by
token; the splice rotates it to where it is used, as any other. What an edit does to the tokens behind it is an offset
that nobody has learned: the first few are computed again, the rest is approximate like all reuse across contexts.
Such a base lives for one call. It is not put into a pool, so that no text is ever a copy of a copy: one that has been
edited too often is computed, and then held itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvcomm.anchors.match import Match, match
from kvcomm.anchors.pool import Base, BasePool
from kvcomm.checks import need
from kvcomm.errors import InvalidInput
from kvcomm.types import Segment, SegmentKV

_CANDIDATES = 3
_COSINE = 0.5  # of the share asked for: sketches err by 1/16, and each edit takes two bigrams


@dataclass(frozen=True)
class Near:
    """A base gathered from a nearly equal text's, 0 at tokens without a counterpart, and how the two texts match."""

    base: Base
    match: Match


def check_near(near: float, after_edit: int) -> None:
    """Raise InvalidInput unless 0 < near <= 1 and after_edit >= 0."""
    need(near, (int, float), "near", "give a share above 0 and up to 1")
    need(after_edit, int, "after_edit", "give 0 or more tokens")
    if not 0.0 < near <= 1.0:
        raise InvalidInput(f"near is {near}; give the least share of tokens in common, above 0 and up to 1 (off)")
    if after_edit < 0:
        raise InvalidInput(f"after_edit is {after_edit}; give 0 or more tokens")


def nearest(segment: Segment, pool: BasePool, near: float, choose: Callable[[list[Base]], Base | None]) -> Near | None:
    """The base of the held text that has most in common with ``segment``, if that is a share of ``near`` or more.

    Args:
        near: tokens in common over those of the longer text, above 0; 1 finds nothing.
        choose: picks one of a text's bases, or none.
    """
    if near >= 1.0:
        return None
    best: tuple[Match, Base] | None = None
    for neighbour in pool.neighbours(segment, _CANDIDATES, _COSINE * near):
        held = neighbour.segment
        if min(len(held), len(segment)) < near * max(len(held), len(segment)):
            continue
        found = match(segment.token_ids, held.token_ids)
        if found.share < near or (best is not None and found.share <= best[0].share):
            continue
        base = choose(pool.bases(held))
        if base is not None:
            best = found, base
    return Near(gather(segment, *best), best[0]) if best is not None else None


def gather(segment: Segment, found: Match, held: Base) -> Base:
    """A base of ``segment`` out of ``held``'s KV, one new allocation; never exact.

    Raises:
        InvalidInput: the match is of texts of other lengths.
    """
    if len(found.source) != len(segment) or found.base_tokens != len(held.kv):
        raise InvalidInput(
            f"a match of {len(found.source)} with {found.base_tokens} tokens does not fit a text of {len(segment)} and "
            f"a base of {len(held.kv)}; match the texts that are gathered from"
        )
    source = torch.tensor(found.source, dtype=torch.int64, device=held.kv.keys.device)
    absent = torch.tensor(found.absent, dtype=torch.int64, device=source.device)
    keys, values = (
        tensor.index_select(2, source.clamp_min(0)).index_fill_(2, absent, 0.0)
        for tensor in (held.kv.keys, held.kv.values)
    )
    return Base(segment, replace(held.recipe, exact=False), SegmentKV(keys, values))
