"""What a call gives back: the answer, what was reused for it, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvcomm.hf.arguments import WITH_A_FILLED_CACHE
from kvcomm.hf.cache import PLAIN, BufferLayer, generation_cache
from kvcomm.hf.latent import Plain
from kvcomm.reuse.backend import KVBuffer
from kvcomm.reuse.plan import Plan, TokenCounts
from kvcomm.types import Segment


@dataclass(frozen=True)
class Usage:
    """Token counts as chat services report them; ``cached_tokens`` is split in two."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    exact: int
    approximate: int

    @classmethod
    def of(cls, counts: TokenCounts, completion_tokens: int) -> Usage:
        """From a plan's counts."""
        cached = counts.exact + counts.approximate
        return cls(counts.total, completion_tokens, cached, counts.exact, counts.approximate)

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached: {self.exact} exact, {self.approximate} "
            f"approximate), {self.completion_tokens} completion tokens"
        )


@dataclass(frozen=True)
class Exactness:
    """How a call's cache became exact, and when its tokens were final.

    Attributes:
        healed_tokens: computed again, over exact KV; 0 where nothing was reused approximately.
        exact_s: seconds from the call until all of the cache was exact; None where the answer ended before.
        drafts: tokens handed out before they were final.
        taken_back: of these, those that did not stand.
        final_s: for each token of the answer the seconds from the call until it was final.
        ties: final greedy tokens beside which another's score lay closer than 1e-4; a dense run may choose that one.
            Counted where there were drafts.
    """

    healed_tokens: int
    exact_s: float | None
    drafts: int
    taken_back: int
    final_s: tuple[float, ...]
    ties: int


@dataclass(frozen=True, repr=False)
class Reply:
    """An agent's answer. Filling another agent's slot with it hands over its token ids, and with them its KV.

    ``print(reply)`` prints the text.

    Attributes:
        text: without control tokens.
        texts: of all sequences where several were asked for, in model.generate's order; ``text`` is the first.
        token_ids: of the first sequence as generated, an end-of-text token included.
        segment: the ids without end-of-text tokens, the answer's identity.
        output: what model.generate returned, for those who asked it for scores; one for all prompts of a batch.
        ttft_s: seconds from the call, text in hand, to the first token, every cost inside; under ``Verified()`` to the
            first draft.
        prefill_s: the part of ttft_s before model.generate: tokenising, planning, splicing, recomputing.
        wall_s: seconds to the last token.
        learn_s: seconds spent afterwards on keeping bases and learning offsets.
        usage: completion tokens are those of all sequences.
        plan: what was done with each part of the prompt, why, and in what time; it holds no KV.
        pool_version: changes whenever bases or offsets that later calls could use do.
        exactness: under ``Healed()`` and ``Verified()``, when the cache and each token were exact; else None.
    """

    text: str
    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    segment: Segment
    output: Any
    ttft_s: float
    prefill_s: float
    wall_s: float
    learn_s: float
    usage: Usage
    plan: Plan
    pool_version: str
    exactness: Exactness | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else f"{self.text[:40]}…"
        return f"Reply({text!r}, {self.usage}, ttft_s={self.ttft_s:.3f})"


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose cache is ready for model.generate, which computes the prompt's last tokens itself.

    Its cache serves one generation; prefill again for another.
    """

    plan: Plan
    buffer: KVBuffer
    cache: Cache
    cache_name: str
    prefill_s: float

    @classmethod
    def of(cls, plan: Plan, buffer: KVBuffer, cache_name: str, prefill_s: float, layout: Plain = PLAIN) -> Prefilled:
        """Wrap a prepared buffer as a transformers cache."""
        return cls(plan, buffer, generation_cache(buffer, layout), cache_name, prefill_s)

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments for model.generate: input_ids and attention_mask [1, prompt tokens], and the cache.

        The others put settings of the model's generation config out of force that do not go with a filled cache.
        """
        ids = torch.tensor([self.plan.prompt.token_ids], dtype=torch.int64, device=self.buffer.keys.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), self.cache_name: self.cache}
        return {**given, **WITH_A_FILLED_CACHE}

    def take_back(self) -> bool:
        """Let the buffer own what was generated into it; False where beams or several rows left it."""
        layers = [layer for layer in self.cache.layers if isinstance(layer, BufferLayer) and layer.in_place]
        if len(layers) != len(self.cache.layers):
            return False
        self.buffer.length = min(layer.get_seq_length() for layer in layers)
        return True
