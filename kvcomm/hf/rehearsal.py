"""What transformers itself would refuse, found before anything is computed.

The model's own generate is run with everything that the call brings and with a decoding loop in which nothing is
decoded: it merges and validates configurations, builds processors and criteria, and never reaches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from kvcomm.checks import need, shown
from kvcomm.errors import InvalidInput, KVCommError
from kvcomm.hf.arguments import WITH_A_FILLED_CACHE

_CALLS_OUT = (PrefixConstrainedLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that call a function of the caller's, or the model."""


def rehearse(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    criteria: Sequence[StoppingCriteria],
    token_ids: Sequence[int],
    new_tokens: int,
) -> None:
    """Let model.generate check a call's arguments; the model is not run, and no function of the caller's is called.

    Args:
        arguments: as they will be handed to model.generate, without prompt and cache.
        criteria: the caller's stopping criteria.
        token_ids: of a prompt, at least one.

    Raises:
        InvalidInput: with what transformers says, whose error is the cause.
    """
    _callable("stopping_criteria", criteria)
    _callable("logits_processor", arguments.get("logits_processor"))
    _callable("prefix_allowed_tokens_fn", arguments.get("prefix_allowed_tokens_fn"), one=True)
    guidance = _setting(model, arguments, "guidance_scale")
    need(guidance, (int, float, type(None)), "guidance_scale", "give a number")
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    _negative_prompt(arguments, vocabulary)
    streamer = arguments.get("streamer")
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise InvalidInput(f"streamer is {shown(streamer)}; pass one of transformers', with put and end")
    strings = _setting(model, arguments, "stop_strings")
    texts = [strings] if isinstance(strings, str) else strings
    if strings is not None and (not isinstance(texts, list | tuple) or not texts or not all(texts)):
        raise InvalidInput(f"stop_strings is {shown(strings)}; give a text, or a list of texts, none of them empty")
    # A streamer would be given the prompt, and for a loop of one's own transformers loses the tokenizer.
    handed = {name: value for name, value in arguments.items() if name not in ("streamer", "tokenizer")}
    handed |= {**WITH_A_FILLED_CACHE, "stop_strings": None}
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=model.device)
    own = [*(arguments.get("logits_processor") or ()), *criteria]
    generate: Any = model.generate
    try:
        if strings is not None:
            StopStringCriteria(arguments["tokenizer"], strings)(ids, torch.zeros(1, 1, device=ids.device))
        generate(
            **handed,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList(criteria),
            custom_generate=_loop(own, vocabulary),
        )
    except KVCommError:
        raise
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        raise InvalidInput(f"transformers refuses the arguments for model.generate: {said}") from error


def _loop(own: Sequence[Any], vocabulary: int) -> Callable[..., torch.Tensor]:
    """A decoding loop that tries transformers' own processors and criteria on one row of scores; it decodes nothing."""

    def nothing(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **_: Any,
    ) -> torch.Tensor:
        scores = torch.zeros(input_ids.shape[0], vocabulary, device=input_ids.device)
        for each in (*logits_processor, *stopping_criteria):
            if not isinstance(each, _CALLS_OUT) and all(each is not one for one in own):
                each(input_ids, scores.clone())
        return input_ids

    return nothing


def _negative_prompt(arguments: dict[str, Any], vocabulary: int) -> None:
    """Refuse a negative prompt that only the model would find wrong."""
    ids, mask = (arguments.get(f"negative_prompt_{what}") for what in ("ids", "attention_mask"))
    for name, given in (("negative_prompt_ids", ids), ("negative_prompt_attention_mask", mask)):
        need(given, (torch.Tensor, type(None)), name, "pass a tensor [rows, tokens]")
    if ids is not None:
        whole = ids.dim() == 2 and ids.numel() and ids.dtype in (torch.int64, torch.int32)
        if not whole or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise InvalidInput(f"negative_prompt_ids is {shown(ids)}; pass ids below {vocabulary}, [rows, tokens]")
        if mask is not None and mask.shape != ids.shape:
            raise InvalidInput(f"negative_prompt_attention_mask is {tuple(mask.shape)}; give it the shape of the ids")


def _setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """What generate will take: the argument, else the caller's config, else the model's."""
    configs = (arguments.get("generation_config"), model.generation_config)
    found = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def _callable(name: str, value: Any, one: bool = False) -> None:
    if value is None or (one and callable(value)):
        return
    if one or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise InvalidInput(f"{name} is {value!r}; pass {'a function' if one else 'a list of them, each callable'}")
