"""Floating-point operations of a prefill, counted from what was computed: products of matrices, two a multiply-add."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcomm.reuse.plan import Plan

_weights: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def prefill_flops(model: PreTrainedModel, plan: Plan) -> float:
    """Operations of the model's layers for the tokens that ``plan`` computes, and of the head for the last one.

    A token at position p attends to p + 1 tokens. Tokens run only to choose what to recompute count by their share of
    the layers (``extra_tokens``), with the mean attention. Moving KV, adding offsets, norms and softmax are left out;
    TTFT has them. In a mixture all experts count.
    """
    attended = [position + 1 for position in plan.computed]
    tokens = len(attended) + plan.extra_tokens
    mean = sum(attended) / len(attended)
    return token_flops(model) * tokens + attention_flops(model) * mean * tokens + _head_flops(model)


def token_flops(model: PreTrainedModel) -> float:
    """Operations of all linear layers but the head, for one token."""
    if model not in _weights:
        head = model.get_output_embeddings()
        _weights[model] = sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        )
    return 2.0 * _weights[model]


def attention_flops(model: PreTrainedModel) -> float:
    """Operations of attention in all layers, for one token attending to one: queries by keys, weights by values."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_hidden_layers * config.num_attention_heads * width


def _head_flops(model: PreTrainedModel) -> float:
    head = model.get_output_embeddings()
    return 2.0 * head.weight.numel() if head is not None else 0.0
