"""KV on its way: a base whose layers arrive in their order, so that the first are used while the others are coming.

Nobody has to know: ``keys`` and ``values`` wait until all of it is there. Who does know asks for one layer at a time.
What is lost on the way raises ArrivalLost in everybody who waits for it, and is no longer in the pool then; whoever
planned with it plans again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from kvcomm.errors import InvalidInput, KVCommError, StoreUnavailable
from kvcomm.store.base import Deadline, empty_kv
from kvcomm.types import ModelFingerprint, SegmentKV

_GRACE_S = 0.1  # whoever fills it gives up at the deadline, and says why; this is for one that cannot


class ArrivalLost(StoreUnavailable):
    """A base that was on its way did not come, for the reason given; compute the text."""


class ArrivingKV(SegmentKV):
    """KV in host memory that one thread fills, layer by layer, while others use what is there.

    Args:
        tokens: how many there will be.
        deadline: when those who wait give up.
    """

    def __init__(self, fingerprint: ModelFingerprint, tokens: int, deadline: Deadline) -> None:
        self._room = empty_kv(fingerprint, tokens)
        self._layers, self._here = fingerprint.n_layers, 0
        self._deadline = deadline
        self._ended = False
        self._reason: KVCommError | None = None  # why it ended
        self._error: KVCommError | None = None  # the same, once those who must know first were told
        self._changed = threading.Condition()
        self._on_end: list[Callable[[KVCommError | None], None]] = []

    def __len__(self) -> int:
        return len(self._room)

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    @property
    def device(self) -> torch.device:
        return self._room.device

    @property
    def keys(self) -> torch.Tensor:
        return self.whole().keys

    @property
    def values(self) -> torch.Tensor:
        return self.whole().values

    @property
    def all_here(self) -> bool:
        """Whether every layer has come."""
        return self._here == self._layers

    def check(self, fingerprint: ModelFingerprint, tokens: int) -> None:
        self._room.check(fingerprint, tokens)

    def whole(self) -> SegmentKV:
        """All layers, waiting for the last. Raises ArrivalLost."""
        self._wait(self._layers)
        return self._room

    def layer(self, layer: int) -> SegmentKV:
        """One layer, [1, kv heads, tokens, head_dim], waiting for it. Raises ArrivalLost."""
        self._wait(layer + 1)
        here = slice(layer, layer + 1)
        return SegmentKV(self._room.keys[here], self._room.values[here])

    @property
    def filled(self) -> SegmentKV:
        """The memory that is filled; all of it is of use only once all is there, which nobody waits for here."""
        return self._room

    # for the one thread that fills it

    @property
    def rooms(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where keys and values of each layer belong, [kv heads, tokens, head_dim] each, contiguous."""
        return list(zip(self._room.keys, self._room.values, strict=True))

    def arrive(self) -> None:
        """The next layer is in its room. Raises InvalidInput if it holds NaN or infinity; it has not arrived then."""
        here = slice(self._here, self._here + 1)
        if not SegmentKV(self._room.keys[here], self._room.values[here]).finite:
            raise InvalidInput(f"KV of layer {self._here} holds NaN or infinity; it is not used")
        if self._here + 1 == self._layers:
            self._end(None)
            return
        with self._changed:
            self._here += 1
            self._changed.notify_all()

    def lose(self, error: KVCommError) -> None:
        """The rest will not come. Whatever was there before is for nobody any more."""
        self._end(error)

    def at_end(self, call: Callable[[KVCommError | None], None]) -> None:
        """Have ``call`` called once all is there (with None) or lost (with the reason), before anybody else learns.

        At once where that is so already.
        """
        with self._changed:
            if not self._ended:
                self._on_end.append(call)
                return
        call(self._reason)

    def _end(self, error: KVCommError | None) -> None:
        with self._changed:
            if self._ended:
                return
            self._ended, self._reason = True, error
            told, self._on_end = self._on_end, []
        try:
            for call in told:
                call(error)
        finally:
            with self._changed:
                self._error = error
                self._here = self._layers if error is None else self._here
                self._changed.notify_all()

    def _wait(self, layers: int) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._error is not None or self._here >= layers, self._deadline.left() + _GRACE_S
            )
        if not there:
            self.lose(self._deadline.error(f"a base of {len(self)} tokens"))
        if self._error is not None:
            raise ArrivalLost(f"a base of {len(self)} tokens was lost on its way: {self._error}")
        if self._here < layers:
            raise ArrivalLost(f"a base of {len(self)} tokens came too late; it can be used from now on")
