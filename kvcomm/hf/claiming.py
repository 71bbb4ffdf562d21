"""One node computes a text that several miss at once: a call claims its longest new text, and shares it early."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from kvcomm.anchors.pool import Claim
from kvcomm.hf.reply import Prefilled
from kvcomm.keys import Recipe
from kvcomm.reuse.policy import Dense, Policy
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.splice import cut

if TYPE_CHECKING:
    from kvcomm.hf.core import Core

log = logging.getLogger(__name__)


class Claimed:
    """A call's claim, of one text at most: two calls that each waited for the other's would wait for nothing.

    It pays where several nodes get one long text at the same time: the others wait for this prefill, which is no longer
    than their own would be, and then fetch. What is claimed is put at the first token, not at the end of the answer.
    """

    def __init__(self, engine: Core, prompt: Prompt | None, policy: Policy) -> None:
        self._engine, self.index = engine, -1
        self.claim: Claim | None = None
        if prompt is None or not engine.learn or isinstance(policy, Dense):
            return
        parts = [part.segment for part in prompt.parts]
        self.index = max(range(len(parts)), key=lambda n: len(parts[n]), default=-1)
        if self.index >= 0:
            wanted = range(self.index + 1)
            self.claim = engine.pool.claim([(parts[n], recipe(prompt, n)) for n in wanted if len(parts[n])])

    def criteria(self, prefilled: Prefilled) -> list[StoppingCriteria]:
        """What shares the text at the first token; nothing where nothing was claimed."""
        return [] if self.claim is None else [_ShareFirst(self, prefilled)]

    def share(self, prefilled: Prefilled) -> None:
        """Put the claimed text and those before it, whose KV is in the buffer by now, if it was computed exactly."""
        plan, engine = prefilled.plan, self._engine
        if plan.parts[self.index].action != "new" or not prefilled.take_back():
            return
        for n, part in enumerate(plan.parts[: self.index + 1]):
            if part.action == "new" and part.stop <= plan.exact_until and len(part.part.segment):
                kv = cut(prefilled.buffer, engine.backend.spec, part.start, part.stop)
                engine.pool.put(part.part.segment, recipe(plan.prompt, n), kv)

    def close(self) -> None:
        """End the claim if the text was not put."""
        if self.claim is not None:
            self.claim.end()


def recipe(prompt: Prompt, n: int) -> Recipe:
    """How part ``n`` is put if all before it is exact; else a claim ends with the call."""
    return Recipe("prompt", prompt.parts[n].label, prompt.preceding[n], True)


class _ShareFirst(StoppingCriteria):
    """Stops nothing."""

    def __init__(self, claimed: Claimed, prefilled: Prefilled) -> None:
        self._claimed, self._prefilled, self._done = claimed, prefilled, False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if not self._done:
            self._done = True
            try:
                self._claimed.share(self._prefilled)
            except Exception as error:  # costs the others a prefill, and this call nothing
                log.warning("a text was not shared early: %s", error, exc_info=error)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]
