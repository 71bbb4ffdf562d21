"""The small model of another family: trained, saved, loaded, and proven by an engine."""

from __future__ import annotations

from pathlib import Path

from eval.models.default import load
from eval.models.train_small import train
from kvcomm import Engine, Slot


def test_two_steps_give_a_model_that_an_engine_takes(tmp_path: Path) -> None:
    train(tmp_path / "small", steps=2, batch=1, seed=0)
    model, tokenizer = load(str(tmp_path / "small"))
    assert type(model).__name__ == "GPTNeoXForCausalLM"
    assert len(tokenizer) == model.config.vocab_size == 4096
    engine = Engine(model, tokenizer)
    agent = engine.agent("reader", ["Read:\n", Slot("text"), "\nSay it:"])
    assert engine.backend.spec.rope is not None
    assert agent.generate(text="The import statement binds names.", max_new_tokens=2).ttft_s > 0
