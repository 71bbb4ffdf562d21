"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what its cache holds, laid out as keys and values.

For each token such a model caches a latent, of which every head's keys and values are made again, and one rotary key
that all heads share. Only the latter carries a position. kvcomm holds one KV head: the rotary key, then the latent, cut
in the middle into two tensors of one width. Its key is thus one of which the first dimensions turn, as with any partial
rotary embedding, and all that moves, stores and corrects keys and values does it for latents too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcomm.errors import UnsupportedModel
from kvcomm.rope.spec import latent_head_dim


@dataclass(frozen=True)
class Plain:
    """Keys and values as the model's attention caches them."""

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From the model's two tensors to kvcomm's."""
        return keys, values

    def unpack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From kvcomm's two tensors to the model's."""
        return keys, values


@dataclass(frozen=True)
class Latent(Plain):
    """A latent and a rotary key, which transformers hands to its cache in the places of keys and values.

    Attributes:
        latent, rotary: their widths; kvcomm's keys and values are half the sum of both wide.
    """

    latent: int
    rotary: int

    def pack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From latents [..., latent] and rotary keys [..., rotary]."""
        head_dim = (self.latent + self.rotary) // 2
        cut = head_dim - self.rotary
        return torch.cat([values, keys[..., :cut]], dim=-1), keys[..., cut:]

    def unpack(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """To latents [..., latent] and rotary keys [..., rotary]."""
        return torch.cat([keys[..., self.rotary :], values], dim=-1), keys[..., : self.rotary]


def layout_of(config: Any) -> Plain:
    """How the model of a configuration caches."""
    return (
        Plain() if latent_head_dim(config) is None else Latent(int(config.kv_lora_rank), int(config.qk_rope_head_dim))
    )


def check_latents(name: str, layout: Plain, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise UnsupportedModel unless a model of latent attention caches latents: [batch, 1, tokens, width] each."""
    if not isinstance(layout, Latent):
        return
    found = (keys.shape[1], keys.shape[-1], values.shape[1], values.shape[-1])
    if found != (1, layout.latent, 1, layout.rotary):
        raise UnsupportedModel(
            f"{name} has multi-head latent attention, but caches {found[0]} heads of {found[1]} and {found[2]} of "
            f"{found[3]}, not one latent of {layout.latent} and one rotary key of {layout.rotary}: not handled"
        )
