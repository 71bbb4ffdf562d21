"""ModelBackend for HuggingFace models: the model's own forward over chosen positions, without patching it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcomm.errors import FingerprintMismatch, InvalidInput, UnsupportedModel
from kvcomm.hf import attention
from kvcomm.hf.attend import Implementation, Shape, choose
from kvcomm.hf.cache import EndOfPass, scatter_cache
from kvcomm.hf.fingerprint import adapter_digest, shape_of, tokenizer_digest, weights_digest
from kvcomm.hf.grouped import Grouped
from kvcomm.hf.latent import Plain, layout_of
from kvcomm.hf.support import (
    cache_argument,
    check_model,
    check_plain,
    layer_kinds,
    layer_windows,
    probe_keys,
    proven_rope,
    text_config,
)
from kvcomm.reuse import fused
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.memory import BufferMemory
from kvcomm.types import ModelFingerprint, digest_fields

_PROVEN_WINDOW = 512  # tokens; wider windows are believed


def model_spec(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str | None = None) -> ModelSpec:
    """Read and prove what reuse needs to know of ``model``.

    Args:
        weights: a digest of the weights that the caller vouches for; computed from the parameters when absent.

    Raises:
        UnsupportedModel: naming the part that cannot be reused.
        InvalidInput: the tokenizer's ids do not fit the model's vocabulary.
    """
    check_model(model)
    config = text_config(model)
    check_plain(model)
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or "meta" in {d.type for d in devices}:
        raise UnsupportedModel(
            f"the model lies on {sorted(map(str, devices))}: load it on one device, for example "
            "model.to('cpu'); several devices are not handled"
        )
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    if len(tokenizer) > vocabulary:
        raise InvalidInput(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: it belongs to another model"
        )
    rope_spec = proven_rope(model, config)
    keys = probe_keys(model, 0)
    fingerprint = ModelFingerprint(
        architecture=f"{type(model).__name__} {digest_fields(shape_of(config).encode())[:16]}",
        weights=weights or weights_digest(model),
        rope=rope_spec.digest,
        dtype=str(keys.dtype).removeprefix("torch."),
        adapter=adapter_digest(model),
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


class HFBackend:
    """Runs one transformers model. Holds no state between calls but the model itself and memory that nobody uses.

    Attributes:
        memory: of requests that are done, for the next ones; see kvcomm.reuse.memory.
        grouped: whether passes over chosen positions run the attention that kvcomm.hf.attend chose. They do where it
            was shown, when the backend was built, to give what the model's own masked attention gives; eager attention
            keeps its own.
        attend: that attention.
        layout: how the model's cache lies in kvcomm's keys and values.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str | None = None) -> None:
        check_model(model)
        if model.training:
            raise InvalidInput("the model is in training mode, in which dropout changes KV; call model.eval() first")
        self.model = model
        self._spec = model_spec(model, tokenizer, weights)
        self._config = text_config(model)
        self.layout = layout_of(self._config)
        self._kinds = layer_kinds(self._config)
        self._cache_name = cache_argument(model)
        own = str(self._config._attn_implementation)
        self._implementation = "sdpa" if own == attention.NAME else own  # another engine's pass is under way
        self._eager = self._implementation == "eager"
        self.grouped = False
        self.attend: Implementation = Grouped
        if not self._eager:
            attention.register()
            if self.layout == Plain():  # heads made of latents have values of another width than their keys
                self.attend = choose(self._shape())
            self.grouped = self._grouped_is_equal()
        self._prove()
        self.memory = BufferMemory()
        fused.handles(self._spec, self._spec.device)  # kernels are compiled now, not in the first call
        self._parameters = tuple(model.parameters())
        self._built = self._state()

    @property
    def spec(self) -> ModelSpec:
        """Shape and identity of the model."""
        return self._spec

    def buffer(self, capacity: int) -> KVBuffer:
        """See ModelBackend.buffer."""
        return KVBuffer(self.spec, capacity, self.memory)

    def check_unchanged(self) -> None:
        """Notice a model that is no longer the one fingerprinted, in well under a millisecond.

        Seen are writes into parameters (training, load_state_dict), moves to another device or dtype, and adapters
        that were loaded, switched or switched off; not seen are writes through ``parameter.data``.

        Raises:
            InvalidInput: the model was put into training mode.
            FingerprintMismatch: its weights or adapters were changed.
        """
        if self.model.training:
            raise InvalidInput("the model is in training mode, in which dropout changes KV; call model.eval() first")
        if self._state() != self._built:
            raise FingerprintMismatch(
                "the model's weights, device, adapters or attention were changed after the engine was built: its pool "
                "belongs to another model; build a new Engine"
            )

    def _state(self) -> tuple[int, int, str, str]:
        writes = sum(0 if p.is_inference() else p._version for p in self._parameters)
        implementation = self._config._attn_implementation
        if implementation == attention.NAME:  # another thread's pass is under way
            implementation = self._implementation
        return writes, sum(p.data_ptr() for p in self._parameters), adapter_digest(self.model), implementation

    @torch.inference_mode()
    def forward(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], logits: int
    ) -> torch.Tensor:
        """See ModelBackend.forward."""
        inputs, where, length = self._inputs(buffer, token_ids, positions)
        with self._attending(inputs, where):
            output = self._run(inputs, logits)
        buffer.length = length
        return output

    @torch.inference_mode()
    def forward_first(self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], layers: int) -> None:
        """See ModelBackend.forward_first."""
        if not 0 <= layers < self.spec.fingerprint.n_layers:
            raise InvalidInput(f"{layers} first layers of {self.spec.fingerprint.n_layers}: give 0 or more, and fewer")
        inputs, where, _ = self._inputs(buffer, token_ids, positions, last=layers)
        with suppress(EndOfPass), self._attending(inputs, where):
            self.model.base_model(**inputs)

    @torch.inference_mode()
    def attended(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], queries: Sequence[int]
    ) -> torch.Tensor:
        """See ModelBackend.attended."""
        rows = {position: row for row, position in enumerate(positions)}
        missing = [q for q in queries if q not in rows]
        if missing or not queries or any(b <= a for a, b in zip(queries, queries[1:], strict=False)):
            raise InvalidInput(f"watched positions must increase and be run in the pass; these are not: {missing}")
        if not (self.grouped or self._eager):
            raise UnsupportedModel(
                f"attention of {type(self.model).__name__} cannot be watched with "
                f"{self._config._attn_implementation!r}; load it with attn_implementation='eager'"
            )
        inputs, where, length = self._inputs(buffer, token_ids, positions)
        watched = [rows[q] for q in queries]
        if self._eager:
            layers = self.model.base_model(**inputs, output_attentions=True).attentions
            mean = sum(layer[0, :, watched].float().mean(0) for layer in layers) / len(layers)
        else:
            watch = attention.Watch(watched, length, self.spec.device)
            with self._attending(inputs, where, watch):
                self.model.base_model(**inputs)
            mean = watch.mean
        buffer.length = length
        return torch.as_tensor(mean)

    def _inputs(
        self, buffer: KVBuffer, token_ids: Sequence[int], positions: Sequence[int], last: int | None = None
    ) -> tuple[dict[str, Any], torch.Tensor, int]:
        """The model's arguments for a pass, its positions [n], and how many tokens are in sight after it."""
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
        inputs[self._cache_name] = scatter_cache(buffer, chosen, positions[0], length, last, self.layout)
        if not (tail and positions[0] == 0 and self._causal_alone(length)):
            inputs["attention_mask"] = self._masks(where, length)
        return inputs, where, length

    def _attending(
        self, inputs: dict[str, Any], where: torch.Tensor, watch: attention.Watch | None = None
    ) -> AbstractContextManager[None]:
        """The attention that a pass runs under: grouped where there is a mask to spare, else the model's own."""
        if not self.grouped or (watch is None and "attention_mask" not in inputs):
            return nullcontext()
        current = attention.Pass(where, self.spec.windows, self.spec.fingerprint.torch_dtype, watch, self.attend)
        return attention.over(self.model, self._config, current)

    def _shape(self) -> Shape:
        f = self.spec.fingerprint
        heads = getattr(self._config, "num_attention_heads", f.n_kv_heads)
        return Shape(int(heads), f.n_kv_heads, f.head_dim, f.torch_dtype, self.spec.device, self.spec.windows)

    def _run(self, inputs: dict[str, Any], logits: int) -> torch.Tensor:
        if logits == 0:
            self.model.base_model(**inputs)
            return torch.empty(0, self.spec.vocab_size)
        result: torch.Tensor = self.model(**inputs, logits_to_keep=logits).logits[0, -logits:]
        return result

    @torch.inference_mode()
    def _prove(self) -> None:
        """Compare passes over chosen positions with the model's plain forward, which knows nothing of kvcomm.

        What is hidden in a configuration shows here: attention that is not causal, windows that are not applied. The
        buffer first holds the KV of other tokens, then every token is recomputed in place in scattered passes.

        Raises:
            UnsupportedModel: the last token's logits differ.
        """
        shown = [w for w in self.spec.windows if w is not None and w <= _PROVEN_WINDOW]
        tokens = min(max([24, *(w + 8 for w in shown)]), self.spec.max_positions)
        ids = [(7 * n + 1) % self.spec.vocab_size for n in range(tokens)]
        inputs = {"input_ids": torch.tensor([ids], device=self.spec.device), "use_cache": False}
        plain = self.model(**inputs).logits[0, -1].float()
        buffer = KVBuffer(self.spec, tokens)
        self.forward(buffer, ids[::-1], range(tokens), 0)
        cuts = sorted({0, tokens // 3, tokens // 2, tokens})
        for start, stop in zip(cuts, cuts[1:], strict=False):
            logits = self.forward(buffer, ids[start:stop], range(start, stop), 1)
        error = float((logits[-1].float() - plain).norm() / plain.norm().clamp_min(1e-30))
        limit = 1e-3 if self.spec.fingerprint.torch_dtype == torch.float32 else 5e-2
        if not error <= limit:
            raise UnsupportedModel(
                f"recomputing {tokens} tokens with {type(self.model).__name__} differs from its plain forward by "
                f"{error:.1e} (limit {limit:.0e}): its attention is not the causal one that its configuration says"
            )

    def _grouped_is_equal(self) -> bool:
        """Run a few scattered tokens with the model's own masks and with grouped attention, and compare."""
        tokens = min(24, self.spec.max_positions)
        ids = [(7 * n + 1) % self.spec.vocab_size for n in range(tokens)]
        positions = [p for p in range(tokens) if p % 5 in (1, 2)]
        buffers, logits = [], []
        for grouped in (False, True):
            self.grouped = False
            buffer = KVBuffer(self.spec, tokens)
            self.forward(buffer, ids, range(tokens), 0)
            self.grouped = grouped
            try:
                logits.append(self.forward(buffer, [ids[-p] for p in positions], positions, 1))
            except attention.NotHandled:
                return False
            buffers.append(torch.stack([buffer.keys, buffer.values]))
        near = 1e-3 if buffers[0].dtype == torch.float32 else 5e-2
        return all(
            bool((a.float() - b.float()).norm() <= near * a.float().norm())
            for a, b in ((buffers[0], buffers[1]), (logits[0], logits[1]))
        )

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
