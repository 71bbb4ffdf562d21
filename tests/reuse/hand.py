"""Scenes made by hand: parts of given lengths and actions, KV that a test chooses, a backend that plays a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import Base
from kvcomm.anchors.statistics import Pair
from kvcomm.keys import Recipe
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import PartPlan, Plan
from kvcomm.reuse.prompt import Part, Prompt
from kvcomm.reuse.select import Scene
from kvcomm.types import ModelFingerprint, Segment, SegmentKV

LAYERS, HEADS, DIM = 4, 2, 3
FINGERPRINT = ModelFingerprint("tiny", "w", "r", "float32", "", "t", LAYERS, HEADS, DIM)
PAIR = Pair("isolated", "", "agent/slot")


class ScriptedBackend:
    """Notes every pass; what a pass writes or returns is the test's."""

    def __init__(
        self,
        write: Callable[[KVBuffer, Sequence[int]], None] | None = None,
        attention: torch.Tensor | None = None,
    ) -> None:
        self.spec = SimpleNamespace(fingerprint=FINGERPRINT, device=torch.device("cpu"))
        self.write, self.attention = write, attention
        self.passes: list[tuple[Any, ...]] = []

    def forward_first(self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], layers: int) -> None:
        self.passes.append((list(token_ids), list(positions), layers))
        if self.write is not None:
            self.write(buffer, positions)

    def attended(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], queries: Sequence[int]
    ) -> torch.Tensor:
        self.passes.append((list(token_ids), list(positions), list(queries)))
        if self.attention is None:
            raise AssertionError("this test expects no attention pass")
        return self.attention


def scene(
    parts: Sequence[tuple[str, int]], backend: ScriptedBackend | None = None, book: OffsetBook | None = None
) -> Scene:
    """A scene of parts (action, tokens); token ids are 100 + position; every KV is zero."""
    chosen: list[PartPlan] = []
    at = 0
    for n, (action, length) in enumerate(parts):
        segment = Segment(tuple(range(100 + at, 100 + at + length)))
        kv = SegmentKV(*torch.zeros(2, LAYERS, HEADS, length, DIM))
        base = None if action == "new" else Base(segment, Recipe("isolated", "", str(n), False), kv)
        chosen.append(PartPlan(Part(segment, f"agent/{n}"), at, action, "", base, PAIR))  # type: ignore[arg-type]
        at += length
    backend = backend or ScriptedBackend()
    buffer = KVBuffer(backend.spec, at)  # type: ignore[arg-type]
    buffer.keys.zero_()
    buffer.values.zero_()
    buffer.length = at
    plan = Plan(Prompt(tuple(part.part for part in chosen)), tuple(chosen), "by hand")
    return Scene(backend, plan, buffer, book or OffsetBook(FINGERPRINT))  # type: ignore[arg-type]
