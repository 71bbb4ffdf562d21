"""Policies that make the cache exact while an answer is written, and how far a call has come with that.

From the first token on whose KV is approximate, all are computed again, left to right and in place: those that were
recomputed before, the question and the answer's own tokens too, since they attended to approximate KV. A piece at a
time, between decode steps. Nothing but the request's own buffer is needed: what stands to the left of a piece is exact
already, so the piece becomes exact as it is written, and later decode steps see less and less that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvcomm.anchors.book import OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.errors import InvalidInput
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Balanced, Policy, check_policy
from kvcomm.reuse.prompt import Prompt

DEFAULT_PIECE = 256
# On a CPU a piece costs what so many tokens of a prefill cost: pieces set the pace of the first tokens, and each draft
# beside one costs a decode step that is lost if the draft is wrong. 256 makes 4 of them in 1,000 tokens.


@dataclass(frozen=True)
class Healed:
    """Another policy's answer, its cache made exact while it is written. Tokens that were given out stay.

    Attributes:
        policy: plans the prompt.
        piece: tokens computed again after each token of the answer, until all are.

    Raises:
        InvalidInput: piece is below 1, or policy heals already.
    """

    policy: Policy = field(default_factory=Balanced)
    piece: int = DEFAULT_PIECE

    def __post_init__(self) -> None:
        _check(self.policy, self.piece)

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        return self.policy.plan(prompt, pool, book)


@dataclass(frozen=True)
class Verified:
    """Drafts as early as another policy's answer, and in the end the dense run's: drafts that it differs from go back.

    Drafts are written while the cache is made exact. Then one pass over them gives what the dense run chooses at each;
    from the first difference on the answer is written anew, over the exact cache. docs/verified.md says what holds for
    greedy decoding and for sampling.

    Attributes:
        policy: plans the prompt; its prefill gives the first draft.
        piece: tokens computed again between two drafts. Larger ones make fewer drafts; the dense answer comes as early.

    Raises:
        InvalidInput: piece is below 1, or policy heals already.
    """

    policy: Policy = field(default_factory=Balanced)
    piece: int = DEFAULT_PIECE

    def __post_init__(self) -> None:
        _check(self.policy, self.piece)

    def plan(self, prompt: Prompt, pool: BasePool, book: OffsetBook) -> Plan:
        return self.policy.plan(prompt, pool, book)


def _check(policy: Policy, piece: int) -> None:
    if isinstance(piece, bool) or not isinstance(piece, int) or piece < 1:
        raise InvalidInput(f"piece is {piece!r}; give a whole number of tokens, 1 or more")
    if isinstance(policy, Healed | Verified):
        raise InvalidInput(f"policy is {policy!r}, which heals already; wrap Balanced() or another that does not")
    check_policy(policy)


def planning(policy: Policy) -> Policy:
    """The policy that plans: the one inside where ``policy`` heals or verifies, else ``policy``."""
    return policy.policy if isinstance(policy, Healed | Verified) else policy


class Healing:
    """How far one call's buffer has been made exact.

    Args:
        buffer: filled as the plan says; pieces are computed in place.
        piece: tokens at a time.

    Attributes:
        until: every position before it is exact.
        tokens: computed again so far.
    """

    def __init__(self, backend: ModelBackend, buffer: KVBuffer, plan: Plan, piece: int) -> None:
        self.backend, self.buffer, self.piece = backend, buffer, piece
        self.until = plan.exact_until
        self.tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Compute the next piece of ``token_ids`` again, all of which hold KV; nothing where all of it is exact."""
        stop = min(self.until + self.piece, len(token_ids))
        if stop > self.until:
            self._compute(token_ids, stop, 0)

    def finish(self, token_ids: Sequence[int], logits: int) -> torch.Tensor:
        """Compute all that is left again, tokens behind the filled part included.

        Returns:
            logits of the last ``logits`` tokens, [logits, vocabulary] in the model's dtype.
        """
        return self._compute(token_ids, len(token_ids), logits)

    def _compute(self, token_ids: Sequence[int], stop: int, logits: int) -> torch.Tensor:
        start, filled = self.until, self.buffer.length
        self.buffer.length = start  # what stands behind is out of sight, and no mask need hide it
        try:
            found = self.backend.forward(self.buffer, token_ids[start:stop], range(start, stop), logits)
        finally:
            self.buffer.length = max(filled, self.buffer.length)
        self.until, self.tokens = stop, self.tokens + stop - start
        return found


def healed(plan: Plan, until: int) -> Plan:
    """The plan of a call whose KV was made exact up to ``until``, to keep and to learn from."""
    return replace(plan, healed_until=min(until, len(plan.prompt)))
