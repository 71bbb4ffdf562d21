"""What callers may hand on to model.generate, name by name: handed on, or refused; docs/generate.md is the same table.

Every argument of transformers' generate and every field of its GenerationConfig stands in one of the tables here. One
that does not, because it is newer than they are or is no argument at all, is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvcomm.checks import need
from kvcomm.errors import InvalidInput
from kvcomm.reuse.policy import Dense, Policy

log = logging.getLogger(__name__)

_NAMED = "it is an argument of the engine or the agent, not one for model.generate"
_OWN = "kvcomm passes it itself"
_CACHE = "the prepared cache takes its place"
_ASSISTED = (
    "transformers' assisted generation gives other tokens when it starts from a filled cache; generate without an "
    "assistant"
)
_MOVED = "transformers 5 has moved this way of generating out of the library; leave it out"
_LOOP = "another generation loop than the model's own would not know of the prepared cache; leave it out"
_ONE_PROCESS = "the prepared cache lives in one process; leave it out"
_COMPILED = "transformers compiles generation with a static cache only; leave it out"
_ENCODER = "it is for encoder-decoder models, which kvcomm does not take; leave it out"

HANDED_ON = frozenset(
    """
    generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn streamer negative_prompt_ids
    negative_prompt_attention_mask tokenizer
    """.split()
)
"""Arguments of generate that are no fields of GenerationConfig."""

FIELDS = frozenset(
    """
    max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams temperature top_k
    top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    sequence_bias guidance_scale watermarking_config num_return_sequences output_attentions output_hidden_states
    output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id use_cache
    disable_compile
    """.split()
)
"""Fields of GenerationConfig that are handed on, from the caller's config or the model's, or as an argument."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"), _OWN),
    **dict.fromkeys(("past_key_values", "cache", "cache_implementation", "cache_config", "max_cache_len"), _CACHE),
    **dict.fromkeys(("label", "policy", "started"), _NAMED),
    "max_length": "give max_new_tokens instead",
    "prefill_chunk_size": "the prompt is prefilled before; leave it out",
    "token_healing": "it changes the prompt's tokens; leave it out",
    **dict.fromkeys(
        """
        assistant_model assistant_tokenizer assistant_early_exit prompt_lookup_num_tokens use_mtp is_assistant
        num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size
        assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type
        """.split(),
        _ASSISTED,
    ),
    **dict.fromkeys(
        "penalty_alpha low_memory dola_layers diversity_penalty num_beam_groups constraints force_words_ids".split(),
        _MOVED,
    ),
    **dict.fromkeys(("custom_generate", "trust_remote_code", "continuous_batching_config"), _LOOP),
    "synced_gpus": _ONE_PROCESS,
    "compile_config": _COMPILED,
    "decoder_start_token_id": _ENCODER,
}
"""Arguments and fields that are refused, with the reason."""

WITH_A_FILLED_CACHE: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "cache_config": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "is_assistant": None,
    "compile_config": None,
}
"""What model.generate is told whatever the model's own generation config says: settings of speed, not of tokens."""

_IDLE = frozenset(
    """
    max_length max_cache_len num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    max_matching_ngram_size assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type
    continuous_batching_config decoder_start_token_id
    """.split()
)
"""Refused fields that do nothing where the model's own generation config has them: what they belong to is not there."""

METADATA = frozenset({"transformers_version"})
"""Fields that describe the file that a config came from."""

_NEUTRAL: dict[str, Any] = {"num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0}
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """A call's settings for model.generate, checked.

    Attributes:
        arguments: to hand on; without ``max_new_tokens``, ``stopping_criteria`` and what the prefilled prompt brings.
        max_new_tokens: as the caller or a generation config asked for, or None where nobody did.
        copies: rows that generate needs for each prompt: beams, or sequences to return.
        returned: sequences that it returns for each prompt.
        whole: whether generate's own first forward must see the whole prompt.
        ends: ids at which generate ends a row, which it then fills up with ``pad``.
        pad: the id that rows are filled up with; 0 where nothing says which.
        every: all settings in force, the model's own config's among them.
    """

    arguments: dict[str, Any]
    max_new_tokens: int | None
    copies: int
    returned: int
    whole: bool
    ends: frozenset[int]
    pad: int
    every: Mapping[str, Any]


def settle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    given: Mapping[str, Any],
    policy: Policy,
    prompts: int = 1,
) -> Settings:
    """Check what a caller wants handed on, against the tables and the model's own generation config, and merge it.

    Args:
        given: arguments for model.generate.
        prompts: in the call.

    Raises:
        InvalidInput: naming what cannot go together with the prepared prompt and cache.
    """
    check_generate_arguments(given)
    own: Any = model.generation_config
    for name, why in REFUSED.items():
        value = getattr(own, name, None)
        if _set(name, value) and name not in _IDLE:
            if name not in WITH_A_FILLED_CACHE:
                raise InvalidInput(
                    f"model.generation_config.{name}={_short(value)}: {why} (model.generation_config.{name} = None)"
                )
            log.debug("model.generation_config.%s is put out of force: %s", name, why)
    for name in _fields(own).keys() & set(dir(GenerationConfig())):
        if name not in (*FIELDS, *REFUSED, *METADATA) and _set(name, getattr(own, name)):
            raise InvalidInput(
                f"model.generation_config.{name}={_short(getattr(own, name))}: kvcomm does not know what it does "
                f"(docs/generate.md); set model.generation_config.{name} = None"
            )
    asked = {k: v for k, v in _fields(given.get("generation_config")).items() if v is not None}
    asked |= {name: value for name, value in given.items() if name != "generation_config"}
    every = {name: value for name, value in _fields(own).items() if value is not None} | asked
    beams, returned = _count(every, "num_beams"), _count(every, "num_return_sequences")
    copies = max(beams, returned)
    if asked.get("streamer") is not None:
        if beams > 1:
            raise InvalidInput("streamer=... with num_beams above 1: a beam's tokens are not final; leave one out")
        if isinstance(asked["streamer"], TextStreamer) and prompts * copies > 1:
            raise InvalidInput(
                f"streamer={type(asked['streamer']).__name__} takes one sequence, this call generates "
                f"{prompts * copies}; generate them one by one"
            )
    whole = _outputs(model, every, policy, prompts)
    if every.get("stop_strings") is not None:
        asked.setdefault("tokenizer", tokenizer)
    ends = _ids(every.get("eos_token_id"))
    pad = next(iter(_ids(every.get("pad_token_id")) + ends), 0)
    arguments = {k: v for k, v in asked.items() if k not in ("max_new_tokens", "stopping_criteria", *METADATA)}
    return Settings(arguments, every.get("max_new_tokens"), copies, returned, whole, frozenset(ends), pad, every)


def _count(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{name}={_short(value)}; give a whole number, 1 or more")
    return value


def check_generate_arguments(given: Mapping[str, Any]) -> None:
    """Raise InvalidInput, naming it, for an argument that cannot go together with the prepared prompt and cache."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"options are {_short(given)}; pass a dict of arguments for model.generate")
    config = given.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InvalidInput(f"generation_config is {_short(config)}; pass a GenerationConfig")
    for prefix, values in (("", given), ("generation_config.", _fields(config))):
        for name, value in values.items():
            if not prefix and name == "max_new_tokens" and value is not None:
                raise InvalidInput(f"{name}={_short(value)}: {_NAMED}")
            if name in REFUSED and _set(name, value):
                raise InvalidInput(
                    f"{prefix}{name}={_short(value)} cannot be handed to model.generate here: {REFUSED[name]}"
                )
            if name == "use_cache" and value is not None and not value:
                raise InvalidInput(f"{prefix}use_cache=False would throw the prepared cache away; leave it out")
            known = name in FIELDS or name in REFUSED or name in METADATA or (not prefix and name in HANDED_ON)
            if not known and value is not None:
                raise InvalidInput(
                    f"{prefix}{name}={_short(value)} is no argument of model.generate that kvcomm knows "
                    "(docs/generate.md); leave it out, or call model.generate with engine.prefill(prompt)"
                )


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: those that generate is told to stop at, else the model's, and the tokenizer's own."""
    ends: Any = given.get("eos_token_id")
    for config in (given.get("generation_config"), model.generation_config):
        ends = getattr(config, "eos_token_id", None) if ends is None else ends
    return frozenset([*_ids(ends), *_ids(tokenizer.eos_token_id)])


def _outputs(model: PreTrainedModel, every: Mapping[str, Any], policy: Policy, prompts: int) -> bool:
    """Whether hidden states or attention are asked for, which only a prompt that generate itself computes has."""
    asked = [name for name in ("output_hidden_states", "output_attentions") if every.get(name)]
    if not asked:
        return False
    if not isinstance(policy, Dense) or prompts > 1:
        raise InvalidInput(
            f"{asked[0]}=True needs every token of one prompt computed by model.generate: KV that is reused brings "
            "none; pass policy=Dense() and one prompt"
        )
    implementation = model.config._attn_implementation
    if "output_attentions" in asked and implementation != "eager":
        raise InvalidInput(
            f"output_attentions=True: attention {implementation!r} keeps no weights; load the model with "
            "attn_implementation='eager'"
        )
    return True


def _fields(config: GenerationConfig | None) -> dict[str, Any]:
    """A config's settings, its private ones left out."""
    return {} if config is None else {k: v for k, v in vars(config).items() if not k.startswith("_")}


def _set(name: str, value: Any) -> bool:
    """Whether a value asks for anything."""
    if value is None or value is False:
        return False
    return name not in _NEUTRAL or value != _NEUTRAL[name]


def _ids(value: Any) -> list[int]:
    listed = value.tolist() if hasattr(value, "tolist") else value
    several = listed if isinstance(listed, list | tuple) else [listed]
    found = [one for one in several if one is not None]
    for one in found:
        need(one, int, "eos_token_id or pad_token_id", "give the id of a token, or a list of them")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else type(value).__name__
