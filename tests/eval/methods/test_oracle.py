"""The oracle takes the tokens that are truly furthest off."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eval.methods.oracle import TrueDeviation
from kvcomm.reuse.backend import KVBuffer
from tests.reuse.hand import ScriptedBackend, scene


class DenseBackend(ScriptedBackend):
    """A dense run whose KV are 1 everywhere."""

    def forward(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], logits: int
    ) -> torch.Tensor:
        buffer.keys.fill_(1.0)
        buffer.values.fill_(1.0)
        buffer.length = len(positions)
        return torch.empty(0, 1)


def test_oracle_by_hand() -> None:
    made = scene([("exact", 2), ("approximate", 4), ("new", 1)], DenseBackend())
    made.buffer.keys.fill_(1.0)
    made.buffer.values.fill_(1.0)
    made.buffer.keys[3, 0, 4] = 3.0  # one layer and head, three dimensions: 12
    made.buffer.values[0, 1, 2, 0] = 5.0  # 16
    made.buffer.values[1, 1, 5, 0] = 2.0  # 1
    made.buffer.keys[2, 0, 1], made.buffer.keys[2, 0, 6] = 99.0, 99.0  # exact and new do not count
    assert TrueDeviation(0.25).choose(made).positions == (2,)
    assert TrueDeviation(0.5).choose(made).positions == (2, 4)
    assert TrueDeviation(0.75).choose(made).positions == (2, 4, 5)
    assert TrueDeviation(0.5).choose(made).extra_tokens == 0
    torch.testing.assert_close(TrueDeviation(0.5).score(made).values, torch.tensor([16.0, 0.0, 12.0, 1.0]))
