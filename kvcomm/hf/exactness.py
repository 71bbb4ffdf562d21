"""Calls under Healed() and Verified(): what they refuse, how they drive model.generate, what they report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from kvcomm.errors import InvalidInput
from kvcomm.hf.arguments import Settings
from kvcomm.hf.reply import Exactness, Prefilled
from kvcomm.hf.stopping import Clock
from kvcomm.hf.verifying import Verifying
from kvcomm.reuse.backend import KVBuffer, ModelBackend
from kvcomm.reuse.healing import Healed, Healing, Verified, healed
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Policy


def check_exactness(policy: Policy, settings: Settings, prompts: int) -> None:
    """Raise InvalidInput, naming it, for what a call under a policy that heals cannot do; others may do anything."""
    if not isinstance(policy, Healed | Verified):
        return
    name = f"{type(policy).__name__}()"
    for asked, value in (("prompts", prompts), ("num_beams or num_return_sequences", settings.copies)):
        if value > 1:
            raise InvalidInput(f"{asked} {value} under {name}: it makes one row exact; generate them one by one")
    if not isinstance(policy, Verified):
        return
    guidance = settings.every.get("guidance_scale")
    if guidance is not None and guidance != 1:
        raise InvalidInput(
            f"guidance_scale={guidance} under {name}: its processor keeps a cache of its own, which cannot go back; "
            "leave one out"
        )
    if isinstance(settings.every.get("watermarking_config"), SynthIDTextWatermarkingConfig):
        raise InvalidInput(
            f"watermarking_config=SynthIDTextWatermarkingConfig under {name}: its processor keeps a state, which "
            "cannot go back; leave one out"
        )


class WhileDecoding(BaseStreamer):
    """Makes the next piece of a cache exact after each token, once the caller's own streamer has the token.

    A stopping criterion would come too early: transformers asks these before it streams.
    """

    def __init__(self, healing: Healing, cache: Cache, streamer: BaseStreamer | None) -> None:
        self.healing, self.cache, self.streamer = healing, cache, streamer
        self.exact: float | None = None
        self._tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt, and then one token at a time."""
        if self.streamer is not None:
            self.streamer.put(value)
        begun = bool(self._tokens)
        self._tokens += value.flatten().tolist()
        if begun and self.exact is None:
            filled = self.cache.get_seq_length()
            self.healing.buffer.length = filled
            self.healing.advance(self._tokens[:filled])
            if self.healing.until == filled:
                self.exact = time.perf_counter()

    def end(self) -> None:
        """The answer is complete."""
        if self.streamer is not None:
            self.streamer.end()


class HealedOne:
    """A prompt that generate continues while its cache is made exact beside it."""

    first: float | None = None
    criteria: Sequence[StoppingCriteria] = ()

    def __init__(self, backend: ModelBackend, prefilled: Prefilled, piece: int, streamer: BaseStreamer | None) -> None:
        self.prefilled, self.plans, self.tails = prefilled, [prefilled.plan], [prefilled.buffer.length]
        self.healing = Healing(backend, prefilled.buffer, prefilled.plan, piece)
        self._beside = WhileDecoding(self.healing, prefilled.cache, streamer)

    def generate_kwargs(self) -> dict[str, Any]:
        """As Prefilled.generate_kwargs, and the streamer, which hands tokens on to the caller's."""
        return {**self.prefilled.generate_kwargs(), "streamer": self._beside}

    def take_back(self, replies: Sequence[int]) -> list[KVBuffer | None]:
        """The buffer, with what was generated."""
        return [self.prefilled.buffer if self.prefilled.take_back() else None]

    def learnable(self, answers: Sequence[Sequence[int]]) -> list[Plan]:
        """The plan to keep and learn from; where the prompt is exact, what is left of the answer is made exact now."""
        plan, healing = self.prefilled.plan, self.healing
        tokens = [*plan.prompt.token_ids, *answers[0]][: self.prefilled.buffer.length]
        if self._beside.exact is None and healing.until >= len(plan.prompt):
            healing.finish(tokens, 0)
        whole = self._beside.exact is not None or healing.until == len(tokens)
        return [healed(plan, len(plan.prompt) if whole else min(healing.until, len(plan.prompt) - 1))]

    def report(self, began: float, clock: Clock) -> Exactness:
        """What to say of the call; ``began`` is time.perf_counter() at its beginning."""
        exact = self._beside.exact
        times = tuple(t - began for t in clock.times)
        return Exactness(self.healing.tokens, None if exact is None else exact - began, 0, 0, times, 0)


class VerifiedOne:
    """A prompt whose answer is drafted, checked and finished by kvcomm's own decoding method inside generate."""

    def __init__(
        self,
        backend: ModelBackend,
        prefilled: Prefilled,
        piece: int,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.prefilled, self.plans, self.tails = prefilled, [prefilled.plan], [prefilled.buffer.length]
        self.verifying = Verifying(
            Healing(backend, prefilled.buffer, prefilled.plan, piece), settings.arguments.get("streamer")
        )
        self._stops: list[StoppingCriteria] = []
        strings = settings.every.get("stop_strings")
        if strings is not None:  # generate hands the tokenizer for these to its own decoding methods only
            self._stops = [StopStringCriteria(settings.arguments.get("tokenizer", tokenizer), strings)]

    def generate_kwargs(self) -> dict[str, Any]:
        """As Prefilled.generate_kwargs, and the decoding method."""
        return {
            **self.prefilled.generate_kwargs(),
            "custom_generate": self.verifying.decode,
            "stop_strings": None,
            "tokenizer": None,
        }

    @property
    def criteria(self) -> list[StoppingCriteria]:
        """To be handed on behind the caller's own."""
        return self._stops

    @property
    def first(self) -> float | None:
        """When the first draft was out."""
        return self.verifying.first

    def take_back(self, replies: Sequence[int]) -> list[KVBuffer | None]:
        """The buffer, with what was generated."""
        return [self.prefilled.buffer]

    def learnable(self, answers: Sequence[Sequence[int]]) -> list[Plan]:
        """The plan to keep and learn from: all of it is exact."""
        return [healed(self.prefilled.plan, len(self.prefilled.plan.prompt))]

    def report(self, began: float, clock: Clock) -> Exactness:
        """What to say of the call; ``began`` is time.perf_counter() at its beginning."""
        run = self.verifying
        exact = None if run.exact is None else run.exact - began
        times = tuple(t - began for t in clock.times)
        return Exactness(run.healing.tokens, exact, run.drafts, run.taken_back, times, run.ties)


def exactly(
    backend: ModelBackend,
    policy: Policy,
    prefilled: Prefilled,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
) -> HealedOne | VerifiedOne | None:
    """How the call goes on under ``policy``; None where the model's own generate alone gives what it promises."""
    if prefilled.plan.exact_until == len(prefilled.plan.prompt):
        return None
    if isinstance(policy, Verified):
        return VerifiedOne(backend, prefilled, policy.piece, settings, tokenizer)
    if isinstance(policy, Healed):
        return HealedOne(backend, prefilled, policy.piece, settings.arguments.get("streamer"))
    return None


def force_healing(
    backend: ModelBackend, prefilled: Prefilled, answer: Sequence[int], piece: int
) -> tuple[torch.Tensor, Plan]:
    """Teacher-force an answer while the cache is made exact, a piece after each token as in generation.

    Returns:
        logits [len(answer) + 1, vocabulary], and the plan to keep and learn from.
    """
    plan, buffer = prefilled.plan, prefilled.buffer
    tokens = [*plan.prompt.token_ids, *answer]
    healing, prompt = Healing(backend, buffer, plan, piece), len(plan.prompt)
    found = [backend.forward(buffer, tokens[buffer.length : prompt], range(buffer.length, prompt), 1)]
    while buffer.length < len(tokens):
        at = buffer.length
        if healing.until < at:
            healing.advance(tokens[:at])
        stop = len(tokens) if healing.until == at else at + 1
        found.append(backend.forward(buffer, tokens[at:stop], range(at, stop), stop - at))
        if healing.until == at:
            healing.until = stop
    whole = healing.until == len(tokens)
    return torch.cat(found), healed(plan, prompt if whole else min(healing.until, prompt - 1))
