"""Texts as token ids in which control tokens are plain characters, from as many threads as there are.

transformers keeps "split special tokens" as state of the tokenizer, set by each call: a call in another thread, the
caller's own even, would turn it off for this one, and a control token in a slot's text would become a real one. So
slots are read by a copy that nobody else calls.
"""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase


class PlainTexts:
    """Reads texts with a tokenizer of its own; once made, nothing in it changes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._own = copy.deepcopy(tokenizer)
        self("a")  # leaves the copy set for all calls to come, without padding or truncation

    def __call__(self, text: str) -> list[int]:
        """Ids of ``text``: nothing in front or behind, special tokens split like any characters."""
        return list(self._own(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
