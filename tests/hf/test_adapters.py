"""PEFT adapters inside a model: its KV is another, and so is its fingerprint; a switch is noticed at the next call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm import Engine, Exact
from kvcomm.errors import FingerprintMismatch, UnsupportedModel
from tests.hf.engines import GREEDY, two_agents
from tests.tiny_models import FAMILIES
from tests.tiny_tokenizer import tiny_tokenizer

peft = pytest.importorskip("peft", reason="adapters are PEFT's; pip install peft")


def adapted() -> Any:
    """A tiny Llama in a PeftModel with two adapters that change what it computes."""
    wrapped = peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    wrapped.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


def test_a_peft_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="get_base_model"):
        Engine(adapted(), tiny_tokenizer())


def test_switching_an_adapter_changes_the_fingerprint_and_is_noticed() -> None:
    wrapped = adapted()
    model = wrapped.get_base_model()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    found = []
    for name in ("default", "other", None):
        if name is None:
            wrapped.base_model.disable_adapter_layers()
        else:
            wrapped.set_adapter(name)
        model.eval()
        engine = Engine(model, tiny_tokenizer(), policy=Exact())
        writer, _ = two_agents(engine)
        reply = writer.generate(task="Say hello to the sea.", max_new_tokens=8, options=GREEDY)
        ids = torch.tensor([reply.plan.prompt.token_ids])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **GREEDY)
        assert tuple(own[0, ids.shape[1] :].tolist()) == reply.token_ids
        found.append((engine.pool.fingerprint.digest, engine.pool.bases(reply.plan.prompt.parts[0].segment)[0].kv))
    assert len({digest for digest, _ in found}) == 3
    assert not torch.allclose(found[0][1].values, found[1][1].values, atol=1e-3)
    wrapped.base_model.enable_adapter_layers()
    with pytest.raises(FingerprintMismatch, match="adapters"):
        writer.generate(task="Say hello to the sea.", max_new_tokens=1, options=GREEDY)
