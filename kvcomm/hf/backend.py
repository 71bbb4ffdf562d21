"""ModelBackend for HuggingFace models: the model's own forward over chosen positions, without patching it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomm.errors import InvalidInput, UnsupportedModel
from kvcomm.hf.cache import scatter_cache
from kvcomm.hf.support import (
    cache_argument,
    layer_kinds,
    layer_windows,
    probe_keys,
    proven_rope,
    text_config,
)
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.types import ModelFingerprint, digest_fields


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters; about 0.6 s a GB on one core."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.detach().cpu().contiguous()
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary, the special tokens and, for fast tokenizers, all rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return digest_fields(rules.encode(), str(tokenizer.special_tokens_map).encode())


def _adapter(model: PreTrainedModel) -> str:
    active = getattr(model, "active_adapters", None)
    if not getattr(model, "_hf_peft_config_loaded", False) or not callable(active):
        return ""
    return ",".join(active())


def model_spec(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str | None = None) -> ModelSpec:
    """Read and prove what reuse needs to know of ``model``.

    Args:
        weights: a digest of the weights that the caller vouches for; computed from the parameters when absent.

    Raises:
        UnsupportedModel: naming the part that cannot be reused.
        InvalidInput: the tokenizer's ids do not fit the model's vocabulary.
    """
    config = text_config(model)
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or "meta" in {d.type for d in devices}:
        raise UnsupportedModel(
            f"the model lies on {sorted(map(str, devices))}: load it on one device, for example "
            "model.to('cpu'); several devices are not handled"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) > vocabulary:
        raise InvalidInput(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: it belongs to another model"
        )
    rope_spec = proven_rope(model, config)
    keys = probe_keys(model, 0)
    fingerprint = ModelFingerprint(
        architecture=f"{type(model).__name__} {digest_fields(_shape_of(config).encode())[:16]}",
        weights=weights or weights_digest(model),
        rope=rope_spec.digest,
        dtype=str(keys.dtype).removeprefix("torch."),
        adapter=_adapter(model),
        tokenizer=tokenizer_digest(tokenizer),
        n_layers=int(keys.shape[0]),
        n_kv_heads=int(keys.shape[1]),
        head_dim=int(keys.shape[3]),
    )
    return ModelSpec(
        fingerprint=fingerprint,
        rope=rope_spec,
        windows=layer_windows(config),
        max_positions=int(config.max_position_embeddings),
        device=next(iter(devices)),
        vocab_size=vocabulary,
    )


def _shape_of(config: Any) -> str:
    fields = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")}
    return json.dumps(fields, sort_keys=True, default=str)


class HFBackend:
    """Runs one transformers model. Holds no state between calls but the model itself."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str | None = None) -> None:
        if model.training:
            raise InvalidInput("the model is in training mode, in which dropout changes KV; call model.eval() first")
        self.model = model
        self._spec = model_spec(model, tokenizer, weights)
        self._kinds = layer_kinds(text_config(model))
        self._cache_name = cache_argument(model)
        self._eager = text_config(model)._attn_implementation == "eager"

    @property
    def spec(self) -> ModelSpec:
        """Shape and identity of the model."""
        return self._spec

    @torch.inference_mode()
    def forward(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], logits: int
    ) -> torch.Tensor:
        """See ModelBackend.forward."""
        self._check(buffer, token_ids, positions)
        where = torch.tensor(positions, dtype=torch.int64, device=self.spec.device)
        length = max(buffer.length, positions[-1] + 1)
        contiguous = positions[-1] - positions[0] + 1 == len(positions)
        tail = contiguous and positions[-1] + 1 == length
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(token_ids)], dtype=torch.int64, device=self.spec.device),
            "position_ids": where[None],
            "use_cache": True,
        }
        chosen = slice(positions[0], positions[-1] + 1) if contiguous else where
        inputs[self._cache_name] = scatter_cache(buffer, chosen, positions[0], length)
        if not (tail and positions[0] == 0 and self._causal_alone(length)):
            inputs["attention_mask"] = self._masks(where, length)
        output = self._run(inputs, logits)
        buffer.length = length
        return output

    def _run(self, inputs: dict[str, Any], logits: int) -> torch.Tensor:
        if logits == 0:
            self.model.base_model(**inputs)
            return torch.empty(0, self.spec.vocab_size)
        result: torch.Tensor = self.model(**inputs, logits_to_keep=logits).logits[0, -logits:]
        return result

    def _causal_alone(self, length: int) -> bool:
        """Whether the model's own causal attention from position 0 is right without a mask of ours."""
        return not self._eager and all(w is None or length <= w for w in self.spec.windows)

    def _masks(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Which of the first ``length`` keys each query sees: [1, 1, queries, length] for each kind of layer."""
        keys = torch.arange(length, device=positions.device)
        seen = keys[None] <= positions[:, None]
        masks = {}
        for kind, window in dict(zip(self._kinds, self.spec.windows, strict=True)).items():
            visible = seen if window is None else seen & (keys[None] > positions[:, None] - window)
            masks[kind] = self._as_mask(visible)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_mask(self, visible: torch.Tensor) -> torch.Tensor:
        if not self._eager:
            return visible[None, None]
        dtype = self.spec.fingerprint.torch_dtype
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return hidden.masked_fill(~visible, torch.finfo(dtype).min)[None, None]

    def _check(self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int]) -> None:
        if not positions or len(positions) != len(token_ids):
            raise InvalidInput(f"{len(token_ids)} tokens at {len(positions)} positions: give each token one position")
        if any(b <= a for a, b in zip(positions, positions[1:], strict=False)) or positions[0] < 0:
            raise InvalidInput("positions must be 0 or more and strictly increasing")
        buffer.check_range(positions[0], positions[-1] + 1)
        fresh = [p for p in positions if p >= buffer.length]
        if fresh and (fresh[0] != buffer.length or fresh[-1] - fresh[0] + 1 != len(fresh)):
            raise InvalidInput(
                f"positions {fresh[0]} to {fresh[-1]} leave a gap behind the {buffer.length} tokens that hold KV"
            )
