"""Whom a judge chooses: an unchanged score can hide a changed choice (arXiv 2601.08343), so choices are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvcomm.errors import InvalidInput


def chosen(
    tokenizer: PreTrainedTokenizerBase, names: Sequence[str], dense: torch.Tensor, other: torch.Tensor
) -> dict[str, Any]:
    """``choice`` and ``dense_choice``: the likeliest of ``names`` as the answer's first word; nothing without names.

    Args:
        dense, other: logits of the answer's first token, [vocabulary].

    Raises:
        InvalidInput: two names begin with the same token.
    """
    if not names:
        return {}
    first = [tokenizer(name.capitalize(), add_special_tokens=False)["input_ids"][0] for name in names]
    if len(set(first)) < len(first):
        raise InvalidInput(f"of the judge's candidates {', '.join(names)} two begin with the same token; rename one")
    return {"choice": names[int(other[first].argmax())], "dense_choice": names[int(dense[first].argmax())]}
