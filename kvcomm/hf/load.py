"""Loading a model for the commands: ready to be compared, on the device that is there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer) of a HuggingFace id or folder, in evaluation mode; in its own dtype on a GPU, else float32.

    Raises:
        OSError: transformers found no model under that name.
    """
    cuda = torch.cuda.is_available()
    found: Any = AutoModelForCausalLM
    model = found.from_pretrained(name, dtype="auto" if cuda else torch.float32)
    tokens: Any = AutoTokenizer
    return model.to("cuda" if cuda else "cpu").eval(), tokens.from_pretrained(name)
