"""Splicing bases that are on their way: layer n is used while layer n + 1 is coming.

A pass writes into a buffer layer by layer and calls ``buffer.before_layer`` as it comes to each: that is where its
bases are waited for and spliced. If one is lost in the middle, ArrivalLost goes up through the pass, the buffer is
given up with all that is in it, and the prompt is planned again without that base: nothing was handed out before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvcomm.anchors.arriving import ArrivalLost, ArrivingKV
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.splice import splice_layer
from kvcomm.rope.view import LinearMap
from kvcomm.types import SegmentKV

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Coming:
    """A base on its way to position ``start``, and what is added to it there."""

    kv: ArrivingKV
    start: int
    offset: SegmentKV | LinearMap | None


class Filling:
    """Splices what is coming into ``buffer``, a layer at a time and each layer once, as it is called for."""

    def __init__(self, buffer: KVBuffer, spec: ModelSpec, coming: list[Coming]) -> None:
        self._buffer, self._spec, self._coming = buffer, spec, coming
        self._next = 0

    def __call__(self, layer: int) -> None:
        """Have every layer up to ``layer`` spliced when this returns. Raises ArrivalLost."""
        while self._next <= layer:
            for one in self._coming:
                splice_layer(self._buffer, self._spec, one.kv.layer(self._next), self._next, one.start, one.offset)
            self._next += 1

    def only(self, plan: Plan) -> None:
        """Let go of what ``plan`` does not use any more, and clear its place, which may hold another request's KV."""
        used = {part.start for part in plan.parts if part.base is not None}
        for one in self._coming:
            if one.start not in used:
                self._buffer.clear(one.start, one.start + len(one.kv))
        self._coming = [one for one in self._coming if one.start in used]


def again_if_lost(work: Callable[[], T]) -> T:
    """``work``, which plans and carries out, again whenever a base that it uses is lost on its way.

    What is lost has left the pool and is not asked for again, so each time there is less that can be lost. All were
    asked for at about the same time and have one deadline: the waits together are no longer than that.
    """
    while True:
        try:
            return work()
        except ArrivalLost as lost:
            log.warning("planning again: %s", lost)
