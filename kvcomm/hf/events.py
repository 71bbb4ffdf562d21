"""An answer as events: tokens handed out as drafts, tokens that are final, drafts taken back."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

Kind = Literal["draft", "final", "back"]


@dataclass(frozen=True)
class Event:
    """What happened to the answer.

    ``draft``: tokens were added at its end and may be taken back. ``back``: the last tokens, all drafts, do not stand.
    ``final``: the oldest drafts are these tokens and stay; where there is no draft, tokens were added that stay.

    Attributes:
        tokens: ids, in the answer's order.
        text: what ``draft`` and ``final`` add to the end of the text shown, or what ``back`` takes off it. Empty for a
            draft that becomes final, and for a token that ends within a character.
    """

    kind: Kind
    tokens: tuple[int, ...]
    text: str


def shown(events: Iterable[Event]) -> str:
    """The text after all events."""
    text = ""
    for event in events:
        text = text.removesuffix(event.text) if event.kind == "back" else text + event.text
    return text


class DraftStreamer(BaseStreamer):
    """A streamer that takes drafts too; ``put`` brings final tokens, drafts that became final among them."""

    def draft(self, token: int) -> None:
        """A token was drafted."""
        raise NotImplementedError

    def back(self, count: int) -> None:
        """The last ``count`` drafts do not stand."""
        raise NotImplementedError


class EventStreamer(DraftStreamer):
    """Turns an answer into events; iterate over it in another thread than the one that generates.

    Under ``Verified()`` drafts come as they are made; under any other policy every token is final at once. Texts are
    cut where transformers' own streamers could cut them: a tokenizer that rewrites what stands before (clean-up of
    spaces) is not followed.

    Args:
        timeout: seconds to wait for an event before ``queue.Empty`` is raised; None waits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, timeout: float | None = None) -> None:
        self.tokenizer, self.timeout = tokenizer, timeout
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._tokens: list[int] = []
        self._pieces: list[str] = []  # the text that each token added
        self._drafts: deque[int] = deque()
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, and then one final token at a time: int64 [1, prompt tokens], [1]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            if self._drafts:
                self._queue.put(Event("final", (self._drafts.popleft(),), ""))
            else:
                self._queue.put(Event("final", (token,), self._add(token)))

    def draft(self, token: int) -> None:
        """See DraftStreamer."""
        self._drafts.append(token)
        self._queue.put(Event("draft", (token,), self._add(token)))

    def back(self, count: int) -> None:
        """See DraftStreamer."""
        if not count:
            return
        gone = tuple(self._tokens[-count:])
        text = "".join(self._pieces[-count:])
        del self._tokens[-count:], self._pieces[-count:]
        for _ in gone:
            self._drafts.pop()
        self._queue.put(Event("back", gone, text))

    def end(self) -> None:
        """No more events; the rest of the text, if a character was not complete, comes in a last one without tokens."""
        rest = self._decode()[len("".join(self._pieces)) :]
        if rest and not self._drafts:
            self._queue.put(Event("final", (), rest))
            self._pieces.append(rest)
        self._queue.put(None)

    def __iter__(self) -> Iterator[Event]:
        while (event := self._queue.get(timeout=self.timeout)) is not None:
            yield event

    def _add(self, token: int) -> str:
        before = len("".join(self._pieces))
        self._tokens.append(token)
        text = self._decode()
        piece = "" if text.endswith("�") else text[before:]
        self._pieces.append(piece)
        return piece

    def _decode(self) -> str:
        decoded: Any = self.tokenizer.decode(self._tokens, skip_special_tokens=True)
        return str(decoded)
