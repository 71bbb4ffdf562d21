"""``python -m eval train-small``: a small model of another family, trained here on Python's own documentation.

To see whether the order of methods holds elsewhere. GPT-NeoX: a quarter of each head rotated, attention and MLP side by
side, no grouped heads, biases, LayerNorm. Seeded; about ten minutes on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from eval.files.progress import stderr_console
from eval.tasks.prose import docstrings, topics

app = typer.Typer(help="Train a small model of another family.", add_completion=False, pretty_exceptions_enable=False)
VOCABULARY = 4096
LENGTH = 640
"""Tokens of a training sequence."""
END = "<|endoftext|>"


@app.command()
def train(
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 300,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 6,
    seed: Annotated[int, typer.Option(help="Weights and order.")] = 0,
) -> None:
    """Train and save the model and its tokenizer."""
    torch.manual_seed(seed)
    texts = ["\n\n".join(paragraphs) for paragraphs in topics().values()] + list(docstrings(200))
    random.Random(seed).shuffle(texts)
    tokenizer = small_tokenizer(texts)
    ids = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    model = small_model(tokenizer)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    with Progress(console=stderr_console()) as progress:
        step = progress.add_task("training", total=steps)
        for inputs in _batches(ids, steps, batch, seed):
            loss = model(input_ids=inputs, labels=inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            last = loss.item()
            progress.update(step, advance=1, description=f"training, loss {last:.2f}")
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(ids)} tokens of text, "
          f"last loss {last:.2f}")  # fmt: skip


def small_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCABULARY tokens, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def small_model(tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """An untrained model of 8 layers, 4 heads of 64, a quarter of each rotated."""
    end = tokenizer.eos_token_id
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                                       "partial_rotary_factor": 0.25},
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def _batches(ids: torch.Tensor, steps: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows of LENGTH tokens at random places, [batch, LENGTH]."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (batch,), generator=draw)
        yield torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
