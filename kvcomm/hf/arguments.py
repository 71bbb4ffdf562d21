"""What callers may hand on to model.generate: what would fight the prepared cache is refused by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from kvcomm.errors import InvalidInput

_NAMED = "it is an argument of the engine or the agent, not one for model.generate"
_OWN = "kvcomm passes it itself"
_CACHE = "the prepared cache takes its place"
_ASSISTED = (
    "transformers' assisted generation gives other tokens when it starts from a filled cache; generate without an "
    "assistant"
)
_REFUSED = {
    "input_ids": _OWN,
    "inputs": _OWN,
    "inputs_embeds": _OWN,
    "attention_mask": _OWN,
    "position_ids": _OWN,
    "past_key_values": _CACHE,
    "cache": _CACHE,
    "cache_implementation": _CACHE,
    "prefill_chunk_size": "the prompt is prefilled before; leave it out",
    "token_healing": "it changes the prompt's tokens; leave it out",
    "max_new_tokens": _NAMED,
    "label": _NAMED,
    "policy": _NAMED,
    "started": _NAMED,
    "max_length": "give max_new_tokens instead",
    "assistant_model": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
}
_ASSISTANTS = ("assistant_early_exit", "prompt_lookup_num_tokens")
WITH_A_FILLED_CACHE: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "token_healing": False,
}
"""What model.generate is told whatever the model's own generation config says."""
_IN_CONFIG = ("cache_implementation", "prefill_chunk_size", "token_healing", *_ASSISTANTS)


def check_generate_arguments(given: Mapping[str, Any]) -> None:
    """Raise InvalidInput, naming it, for an argument that cannot go together with the prepared prompt and cache."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"options are {_short(given)}; pass a dict of arguments for model.generate")
    for name, why in _REFUSED.items():
        if given.get(name) is not None:
            raise InvalidInput(f"{name}={_short(given[name])} cannot be handed to model.generate here: {why}")
    config = given.get("generation_config")
    for name in _IN_CONFIG:
        if getattr(config, name, None):
            raise InvalidInput(f"generation_config.{name}={_short(getattr(config, name))}: {_REFUSED[name]}")
    if given.get("use_cache") is False or getattr(config, "use_cache", None) is False:
        raise InvalidInput("use_cache=False would throw the prepared cache away; leave it out")


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those that generate is told to stop at, else the model's, and the tokenizer's own."""
    ends: Any = given.get("eos_token_id")
    for config in (given.get("generation_config"), model.generation_config):
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
    listed = ends.tolist() if hasattr(ends, "tolist") else ends
    several = listed if isinstance(listed, list | tuple) else [listed]
    return frozenset(int(end) for end in [*several, tokenizer.eos_token_id] if end is not None)


class Clock(StoppingCriteria):
    """Notes when the first token is out; stops nothing."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else type(value).__name__
