"""The decode loop of Verified(): drafts beside the healing, one pass that checks them, then the exact answer.

It runs inside the model's own generate, as its decoding method (``custom_generate``): logits processors, warpers,
stopping criteria and their order are those that transformers prepared for the call. Processors see at each place of the
answer what they see in a plain run, and so do stopping criteria, which see final tokens only.

Sampling draws the noise of each place of the answer once, from torch's generator and in the order of the places, as a
plain run does. Draft and final token of one place share it. So the final tokens are those of a plain run with the same
seed, and drafts are mostly right although they are sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvcomm.closeness import is_tie
from kvcomm.hf.cache import generation_cache
from kvcomm.hf.events import DraftStreamer
from kvcomm.hf.latent import layout_of
from kvcomm.hf.stopping import Cancellation
from kvcomm.reuse.healing import Healing

_ENDS = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


@dataclass(frozen=True)
class Choice:
    """A token chosen at one place of the answer.

    Attributes:
        logits, scores: float32 [1, vocabulary], before and after the logits processors; one where these work in place.
    """

    token: int
    logits: torch.Tensor
    scores: torch.Tensor


class Chooser:
    """Chooses tokens as transformers' own loop does, as often as asked at each place and always alike."""

    def __init__(self, processors: LogitsProcessorList, sample: bool) -> None:
        self.processors, self.sample = processors, sample
        self._noise: list[torch.Tensor] = []
        self._used = 0

    def choose(self, ids: torch.Tensor, place: int, logits: torch.Tensor) -> Choice:
        """The token behind ``ids`` (int64 [1, n]), the answer's ``place``-th from 0; logits are [vocabulary]."""
        raw = logits[None].to(dtype=torch.float32, copy=True)
        scores: torch.Tensor = self.processors(ids, raw)  # type: ignore[arg-type]
        if not self.sample:
            return Choice(int(scores.argmax(-1)), raw, scores)
        probabilities = scores.softmax(-1)
        # How torch.multinomial draws one: the largest ratio of probability and exponential noise
        return Choice(int((probabilities / self._noise_of(place, probabilities)).argmax(-1)), raw, scores)

    def used(self, place: int) -> None:
        """Nobody asks for ``place`` or an earlier one any more."""
        for n in range(self._used, min(place + 1, len(self._noise))):
            self._noise[n] = self._noise[n].new_empty(0)
        self._used = max(self._used, place + 1)

    def _noise_of(self, place: int, like: torch.Tensor) -> torch.Tensor:
        while len(self._noise) <= place:
            self._noise.append(torch.empty_like(like).exponential_(1))
        return self._noise[place]


class Verifying:
    """One call's decoding; hand ``decode`` to model.generate as ``custom_generate``.

    Args:
        healing: of the call's buffer, filled to somewhere before the prompt's last token.
        streamer: gets final tokens; drafts too if it is a DraftStreamer.

    Attributes:
        first: time.perf_counter() when the first draft was out.
        exact: the same when the whole cache was exact.
        drafts, taken_back: tokens handed out before they were final, and those of them that did not stand.
        ties: final greedy tokens beside which another lay closer than 1e-4: there a dense run may choose that one.
    """

    def __init__(self, healing: Healing, streamer: BaseStreamer | None) -> None:
        self.healing, self.buffer, self.backend = healing, healing.buffer, healing.backend
        self.streamer = streamer
        self.first: float | None = None
        self.exact: float | None = None
        self.drafts = self.taken_back = self.ties = 0

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """transformers' decoding method: input_ids [1, prompt tokens]; returns as transformers' own does."""
        prompt: list[int] = input_ids[0].tolist()
        chooser = Chooser(logits_processor, bool(generation_config.do_sample))
        drafts, logits = self._draft(prompt, input_ids, chooser, stopping_criteria)
        final: list[int] = []
        kept: list[Choice] = []
        wanted = bool(generation_config.return_dict_in_generate)
        rows = list(logits)
        finished = False
        while not finished:
            row = rows.pop(0) if rows else self._step(prompt, final)
            chosen = chooser.choose(input_ids, len(final), row)
            chooser.used(len(final))
            pending = drafts[len(final) :]
            if pending and pending[0] != chosen.token:
                self._take_back(len(pending))
                drafts, rows = [], []
                self.buffer.length = len(prompt) + len(final)
            final.append(chosen.token)
            self.ties += not chooser.sample and is_tie(chosen.scores[0])
            input_ids = _longer(input_ids, chosen.token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([chosen.token]))
            if wanted:
                kept.append(chosen)
            seen = tuple(choice.scores for choice in kept) if generation_config.output_scores and wanted else None
            finished = bool(stopping_criteria(input_ids, seen).all())
        self._take_back(len(drafts) - len(final))
        self.buffer.length = min(self.buffer.length, len(prompt) + len(final))
        if self.streamer is not None:
            self.streamer.end()
        if not wanted:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=tuple(c.scores for c in kept) if generation_config.output_scores else None,  # type: ignore[arg-type]
            logits=tuple(c.logits for c in kept) if generation_config.output_logits else None,  # type: ignore[arg-type]
            past_key_values=generation_cache(self.buffer, layout_of(model.config.get_text_config(decoder=True))),
        )

    def _draft(
        self, prompt: list[int], ids: torch.LongTensor, chooser: Chooser, criteria: StoppingCriteriaList
    ) -> tuple[list[int], torch.Tensor]:
        """Draft until the cache can be made exact in one more piece, and do that.

        Returns:
            the drafts, and exact logits at the prompt's end and at each draft, [drafts + 1, vocabulary].
        """
        healing, drafts = self.healing, list[int]()
        ends = StoppingCriteriaList(c for c in criteria if isinstance(c, _ENDS))
        at = self.buffer.length
        logits = self.backend.forward(self.buffer, prompt[at:], range(at, len(prompt)), 1)
        ended = False
        while True:
            if not ended:
                token = chooser.choose(ids, len(drafts), logits[-1]).token
                drafts.append(token)
                ids = _longer(ids, token)
                self._hand_out(token)
                ended = bool(ends(ids, None).all()) if ends else False
            Cancellation.check(criteria)
            if len(prompt) - healing.until <= healing.piece:
                break
            healing.advance(prompt)
            Cancellation.check(criteria)
            if not ended:
                at = self.buffer.length
                logits = self.backend.forward(self.buffer, [drafts[-1]], [at], 1)
        exact = healing.finish([*prompt, *drafts], len(drafts) + 1)
        self.exact = time.perf_counter()
        Cancellation.check(criteria)
        return drafts, exact

    def _step(self, prompt: Sequence[int], final: Sequence[int]) -> torch.Tensor:
        """Logits [vocabulary] behind the last final token, whose KV is computed now."""
        at = len(prompt) + len(final) - 1
        return self.backend.forward(self.buffer, [final[-1]], [at], 1)[0]

    def _hand_out(self, token: int) -> None:
        self.drafts += 1
        if isinstance(self.streamer, DraftStreamer):
            self.streamer.draft(token)
        if self.first is None:
            self.first = time.perf_counter()

    def _take_back(self, count: int) -> None:
        if count > 0:
            self.taken_back += count
            if isinstance(self.streamer, DraftStreamer):
                self.streamer.back(count)


def _longer(ids: torch.Tensor, token: int) -> torch.LongTensor:
    longer: Any = torch.cat([ids, torch.tensor([[token]], device=ids.device)], dim=-1)
    return longer  # type: ignore[no-any-return]
