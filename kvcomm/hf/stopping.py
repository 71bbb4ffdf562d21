"""Stopping criteria of kvcomm's own: when the first token was out, and whether the caller gave up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

from kvcomm.checks import need
from kvcomm.store.base import Deadline


def criteria_of(arguments: dict[str, Any]) -> tuple[StoppingCriteria, ...]:
    """Take the stopping criteria out of ``arguments``.

    Raises:
        InvalidInput: they are not a list.
    """
    given = arguments.pop("stopping_criteria", None)
    if given is None:
        return ()
    need(given, (list, tuple), "stopping_criteria", "pass a list of them, or nothing")
    return tuple(given)


class Cancelled(Exception):
    """The caller gave up; nothing was kept of the call."""


class Clock(StoppingCriteria):
    """Notes when each token is out; stops nothing.

    Attributes:
        times: ``time.perf_counter()`` at each token of the answer, of all rows together.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    @property
    def first(self) -> float | None:
        """When the first token was out, if one was."""
        return self.times[0] if self.times else None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


class Cancellation(StoppingCriteria):
    """Stops at the next token once ``cancel`` was called, from whichever thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop the generation that this was handed to, and give nothing back."""
        self._event.set()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        shape = (input_ids.shape[0],)
        return torch.full(shape, self.cancelled, device=input_ids.device)  # type: ignore[return-value]

    @property
    def cancelled(self) -> bool:
        """Whether the generation is to stop."""
        return self._event.is_set()

    @staticmethod
    def check(criteria: Sequence[StoppingCriteria]) -> None:
        """Raise Cancelled if one of the criteria is a Cancellation that was cancelled."""
        if any(isinstance(one, Cancellation) and one.cancelled for one in criteria):
            raise Cancelled("the call was cancelled")


class Until(Cancellation):
    """Stops at the next token once a deadline has passed too: nobody waits for the answer any more."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    @property
    def cancelled(self) -> bool:
        """Whether the generation is to stop."""
        return super().cancelled or not self._deadline.left()
