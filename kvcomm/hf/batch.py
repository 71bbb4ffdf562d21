"""Several sequences in one generation: prompts of different lengths, padded on the left, each in as many rows as asked.

Every row of the cache is filled up to the token before its prompt's last, and generate's first forward computes that
one token for all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvcomm.hf.arguments import WITH_A_FILLED_CACHE
from kvcomm.hf.cache import PLAIN, BufferLayer
from kvcomm.hf.latent import Plain
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.prompt import Prompt


@dataclass(frozen=True)
class Rows:
    """Prompts side by side in one cache; it serves one generation.

    Attributes:
        keys, values: [n_layers, rows, n_kv_heads, longest prompt + room, head_dim]; a prompt's rows lie together, and a
            shorter prompt begins so many tokens later that all end at the same place.
        copies: rows for each prompt.
    """

    prompts: Sequence[Prompt]
    keys: torch.Tensor
    values: torch.Tensor
    copies: int
    cache: Cache

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        prompts: Sequence[Prompt],
        filled: Iterable[KVBuffer],
        room: int,
        copies: int,
        layout: Plain = PLAIN,
    ) -> Rows:
        """Copy each prompt's buffer, which holds all but its last token, into rows of its own.

        Args:
            filled: one buffer for each prompt; taken one by one, so that no two need exist at a time.
            room: tokens to be generated.
        """
        f, longest = spec.fingerprint, max(map(len, prompts))
        shape = (f.n_layers, len(prompts) * copies, f.n_kv_heads, longest + room, f.head_dim)
        # Zeros in front of a shorter prompt: hidden by the mask, but 0 times NaN would not be.
        keys, values = (torch.zeros(shape, dtype=f.torch_dtype, device=spec.device) for _ in range(2))
        for n, (prompt, buffer) in enumerate(zip(prompts, filled, strict=True)):
            where = slice(longest - len(prompt), longest - 1)
            mine = slice(n * copies, (n + 1) * copies)
            keys[:, mine, :, where] = buffer.keys[:, None, :, : len(prompt) - 1]
            values[:, mine, :, where] = buffer.values[:, None, :, : len(prompt) - 1]
        cache = Cache(layers=[BufferLayer(keys[n], values[n], longest - 1, layout) for n in range(f.n_layers)])
        return cls(prompts, keys, values, copies, cache)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, at whose end generation begins in every row."""
        return max(map(len, self.prompts))

    def generate_kwargs(self, cache_name: str, pad: int) -> dict[str, Any]:
        """Arguments for model.generate: input_ids and attention_mask [prompts, longest prompt], and the cache."""
        ids = torch.full((len(self.prompts), self.longest), pad, dtype=torch.int64, device=self.keys.device)
        mask = torch.zeros_like(ids)
        for n, prompt in enumerate(self.prompts):
            ids[n, self.longest - len(prompt) :] = torch.tensor(prompt.token_ids, device=ids.device)
            mask[n, self.longest - len(prompt) :] = 1
        return {"input_ids": ids, "attention_mask": mask, cache_name: self.cache, **WITH_A_FILLED_CACHE}

    def take_back(self, replies: Sequence[int]) -> list[KVBuffer]:
        """Each prompt's first row as a buffer of its own, over the same memory.

        Args:
            replies: for each prompt the tokens of its first sequence that count.

        Returns:
            buffers that hold the prompt and the reply as far as they were computed here; where beams moved the rows to
            other memory, the prompt without its last token.
        """
        layers = [layer for layer in self.cache.layers if isinstance(layer, BufferLayer) and layer.in_place]
        whole = len(layers) == len(self.cache.layers)
        end = min(layer.get_seq_length() for layer in layers) if whole else self.longest - 1
        buffers = []
        for n, (prompt, reply) in enumerate(zip(self.prompts, replies, strict=True)):
            pad, row = self.longest - len(prompt), n * self.copies
            length = min(end - pad, len(prompt) + reply)
            buffers.append(KVBuffer.over(self.keys[:, row, :, pad:], self.values[:, row, :, pad:], length))
        return buffers
