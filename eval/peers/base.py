"""What a peer is: a program that answers prompts with and without reuse, or a reason why it cannot run here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from eval.running.setting import Setting
from kvcomm.errors import KVCommError
from kvcomm.reuse.prompt import Prompt


class Absent(KVCommError):
    """The program is not here, or not in a form that runs on this machine; the message says which and how to get it."""


@dataclass(frozen=True)
class Answer:
    """What a peer gave back.

    Attributes:
        ttft_s: seconds to the first token as a client sees it.
        tokens: the greedy answer as ids, or as characters where the program gives only text.
        reused: prompt tokens that it says it took from its cache.
    """

    ttft_s: float
    tokens: tuple[object, ...]
    reused: int


class Running(Protocol):
    """A peer that has loaded the model."""

    @property
    def version(self) -> str:
        """The program's own version."""
        ...

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        """Answer greedily.

        Args:
            prompt: token ids, and for kvcomm where its parts begin.
            tokens: length of the answer at most.
            reuse: whether the cache may be used; without it nothing of an earlier call is.
        """
        ...


class Peer(Protocol):
    """A program."""

    @property
    def name(self) -> str:
        """As it is reported."""
        ...

    def run(self, setting: Setting) -> AbstractContextManager[Running]:
        """Start it on the setting's model.

        Raises:
            Absent: it cannot run here.
        """
        ...
