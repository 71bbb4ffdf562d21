"""The real tokenizer and a model of three small layers: whole runs of the suite in seconds, figures of no meaning."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.models.default import model_digest, resolve
from eval.running.setting import Setting


def tiny_setting() -> Setting:
    """A Setting whose model is random, the same at every call."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(None))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    return Setting(model, tokenizer, "tiny", model_digest(model))
