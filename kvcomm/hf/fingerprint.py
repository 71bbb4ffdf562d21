"""Digests of what changes KV for the same tokens: weights, tokenizer, adapters, configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomm.types import digest_fields


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters; about 0.6 s a GB on one core.

    Buffers that are saved with the model count too: some ways of quantising keep weights in them.
    """
    hasher = hashlib.sha256()
    saved = {name: buffer for name, buffer in model.named_buffers() if _is_saved(model, name)}
    for name, held in sorted({**dict(model.named_parameters()), **saved}.items()):
        tensor = held.detach().cpu().contiguous()
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _is_saved(model: PreTrainedModel, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(owner)._non_persistent_buffers_set


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary, the special tokens and, for fast tokenizers, all rules.

    Padding and truncation are left out: a call with ``padding=True`` leaves them set, and no segment is tokenised with
    them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
    rules = {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
    return digest_fields(json.dumps(rules, sort_keys=True).encode(), str(tokenizer.special_tokens_map).encode())


def adapter_digest(model: PreTrainedModel) -> str:
    """Names of the active PEFT adapters and a digest of their configurations, whose scaling is in no parameter; empty
    where there is none. An adapter that is switched off counts as such.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    active: set[str] = set()
    for module in model.modules():  # the layers know; the model does not where PEFT itself put the adapter in
        if getattr(module, "_disable_adapters", False):
            return "disabled"
        held = getattr(module, "_active_adapter", None) or ()
        active.update([held] if isinstance(held, str) else held)
    names = sorted(active)
    settings = [_settings(configs[name]) for name in names if name in configs]
    return f"{','.join(names)} {digest_fields(*(text.encode() for text in settings))[:16]}"


def shape_of(config: Any) -> str:
    """A configuration as text, without what does not change KV."""
    return _settings(config, ("_name_or_path", "transformers_version", "dtype"))


def _settings(config: Any, without: Sequence[str] = ("base_model_name_or_path", "inference_mode", "revision")) -> str:
    fields = {k: v for k, v in config.to_dict().items() if k not in without}
    return json.dumps(fields, sort_keys=True, default=_stable)


def _stable(value: Any) -> Any:
    """Sets have no order of their own from one process to the next."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
