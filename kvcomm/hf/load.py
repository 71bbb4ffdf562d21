"""Loading a model for the commands: ready to be compared, on the device that is there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvcomm.errors import InvalidInput


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer) of a HuggingFace id or folder, in evaluation mode; in its own dtype on a GPU, else float32.

    Raises:
        InvalidInput: there is no model and tokenizer under that name that transformers loads, whatever it says.
    """
    cuda = torch.cuda.is_available()
    found: Any = AutoModelForCausalLM
    tokens: Any = AutoTokenizer
    try:
        model = found.from_pretrained(name, dtype="auto" if cuda else torch.float32)
        return model.to("cuda" if cuda else "cpu").eval(), tokens.from_pretrained(name)
    except Exception as error:  # files of all kinds are read here, and each kind has errors of its own
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidInput(f"model {name!r} does not load ({said}); pass a folder or a name") from error
