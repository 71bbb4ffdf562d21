"""What is learned of a slot takes a fraction of the published design's memory."""

from __future__ import annotations

import torch

from kvcomm.anchors.statistics import OffsetStatistics, Pair
from kvcomm.types import SegmentKV

LAYERS, HEADS, HEAD_DIM, TOKENS, AGENTS = 30, 3, 64, 512, 5
PUBLISHED_ANCHORS = 20


def test_a_slot_of_512_tokens_in_five_agents_takes_a_quarter_of_the_published_design_or_less() -> None:
    statistics = OffsetStatistics(LAYERS, HEADS, HEAD_DIM)
    for number in range(AGENTS - 1):
        pair = Pair("prompt", "agent-0/slot", f"agent-{number + 1}/slot")
        base, true = (torch.randn(2, LAYERS, HEADS, TOKENS, HEAD_DIM) for _ in range(2))
        statistics.observe(pair, SegmentKV(*base), SegmentKV(*true))
    delta = 2 * LAYERS * HEADS * TOKENS * HEAD_DIM * 4  # K and V, float32
    published = PUBLISHED_ANCHORS * AGENTS * delta
    assert statistics.nbytes <= published / 4
    before = statistics.nbytes
    for number in range(3):  # however many calls are seen
        base, true = (torch.randn(2, LAYERS, HEADS, TOKENS, HEAD_DIM) for _ in range(2))
        statistics.observe(
            Pair("prompt", "agent-0/slot", f"agent-{number + 1}/slot"), SegmentKV(*base), SegmentKV(*true)
        )
    assert statistics.nbytes == before
    print(f"{statistics.nbytes / 1e6:.0f} MB against {published / 1e6:.0f} MB")
