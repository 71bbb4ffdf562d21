"""Handing a prefill over: one engine computes a prompt's KV, another one decodes from it without prefilling.

Layers leave as they are computed and are spliced as they come; what is handed over are exact bases in the unrotated
frame, one for each part of the prompt. The engine that decodes finds them in its pool and plans as always: whatever
is lost on the way it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from kvcomm.anchors.arriving import ArrivingKV
from kvcomm.errors import InvalidInput, KVCommError, StoreUnavailable
from kvcomm.hf.core import Core
from kvcomm.hf.turns import turn
from kvcomm.keys import Recipe
from kvcomm.reuse.arriving import again_if_lost
from kvcomm.reuse.backend import KVBuffer, ModelSpec
from kvcomm.reuse.plan import Plan
from kvcomm.reuse.policy import Exact, exact_head
from kvcomm.reuse.prompt import Prompt
from kvcomm.reuse.run import complete
from kvcomm.reuse.splice import cut_layer
from kvcomm.store.base import Deadline
from kvcomm.types import Segment

Send = Callable[[Sequence[torch.Tensor]], None]
"""Sends one layer's tensors, keys and values of each part in turn, and raises KVCommError where it cannot."""


class Departure:
    """A thread that takes layers out of a buffer and sends them, each once and in order, while the next is computed."""

    def __init__(self, spec: ModelSpec, spans: Sequence[tuple[int, int]], send: Send) -> None:
        self._spec, self._spans, self._send = spec, spans, send
        self._left = 0
        self._error: KVCommError | None = None
        self._ready: SimpleQueue[tuple[KVBuffer, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="departure", daemon=True)
        self._thread.start()

    def leave(self, buffer: KVBuffer, layer: int) -> None:
        """``layer`` of ``buffer`` is final. Raises KVCommError once sending has failed: nobody waits for the rest."""
        if self._error is not None:
            raise self._error
        if layer >= self._left:  # a pass that is run again comes to some of them twice
            self._left = layer + 1
            self._ready.put((buffer, layer))

    def finish(self) -> None:
        """Wait until everything has left. Raises KVCommError if it has not."""
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread after what it was given; may be called more than once."""
        self._ready.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        while (found := self._ready.get()) is not None:
            if self._error is not None:
                continue
            buffer, layer = found
            try:
                parts = [cut_layer(buffer, self._spec, layer, *span) for span in self._spans]
                self._send([t.cpu().contiguous() for kv in parts for t in (kv.keys, kv.values)])
            except KVCommError as error:
                self._error = error
            except Exception as error:
                self._error = StoreUnavailable(f"sending a layer failed: {type(error).__name__}: {error}")


def hand_over(engine: Core, prompt: Prompt, first: int = 0, send: Send | None = None) -> Plan:
    """Prefill all of a prompt, reusing nothing but exact KV, and keep it as the engine keeps a call's.

    Args:
        first: the first part whose KV is sent; the receiver holds those before it.
        send: called with each layer, from a thread of its own, while the next is computed; None sends nothing.

    Returns:
        the plan as it was carried out.

    Raises:
        InvalidInput: as ``Engine.prefill``, there is no such part, or LongRoPE computes the prompt in another frame
            than the pool's.
        KVCommError: what ``send`` raised; the pass was given up.
    """
    _check(engine, prompt)
    if not 0 <= first <= len(prompt.parts):
        raise InvalidInput(f"part {first} of a prompt of {len(prompt.parts)} parts: give one of them")
    spans = [span for span in _spans(prompt)[first:] if span[0] < span[1]]
    departure = None if send is None or not spans else Departure(engine.backend.spec, spans, send)

    def leaving(buffer: KVBuffer, layer: int) -> None:
        if departure is not None:
            departure.leave(buffer, layer)

    def work() -> tuple[Plan, KVBuffer]:
        plan = Exact().plan(prompt, engine.pool, engine.book)
        with turn(engine.model, engine.backend.spec):
            return complete(engine.backend, plan, engine.book, leaving)

    try:
        plan, buffer = again_if_lost(work)
        if departure is not None:
            departure.finish()
    finally:
        if departure is not None:
            departure.stop()
    if engine.learn:
        engine._learn_from(plan, buffer, Segment(()), "", Exact())
    return plan


class Expected:
    """KV of a prompt that is on its way into an engine's pool, from part ``first`` on; before that the pool holds it.

    Attributes:
        first: how many parts need not be sent.
        rooms: for each layer where its tensors belong, in the order in which ``Send`` gets them; none if all is held.
    """

    def __init__(self, engine: Core, prompt: Prompt, deadline: Deadline) -> None:
        _check(engine, prompt)
        if engine.backend.spec.device.type != "cpu":
            raise InvalidInput(f"KV is received into host memory, the model is on {engine.backend.spec.device}")
        self.first = len(exact_head(prompt, engine.pool))
        texts = [n for n in range(self.first, len(prompt.parts)) if len(prompt.parts[n].segment)]
        # All memory first: where it is not there nothing is expected that nobody would send
        self._kvs = [ArrivingKV(engine.pool.fingerprint, len(prompt.parts[n].segment), deadline) for n in texts]
        for n, kv in zip(texts, self._kvs, strict=True):
            part = prompt.parts[n]
            engine.pool.expect(part.segment, Recipe("prompt", part.label, prompt.preceding[n], True), kv)
        layers = engine.pool.fingerprint.n_layers if self._kvs else 0
        rooms = [kv.rooms for kv in self._kvs]
        self.rooms = [[tensor for room in rooms for tensor in room[layer]] for layer in range(layers)]

    def arrive(self) -> None:
        """The next layer is in its rooms. Raises InvalidInput if it holds NaN or infinity."""
        for kv in self._kvs:
            kv.arrive()

    def lose(self, error: KVCommError) -> None:
        """The rest will not come."""
        for kv in self._kvs:
            kv.lose(error)


def _spans(prompt: Prompt) -> list[tuple[int, int]]:
    return [(start, start + len(part.segment)) for start, part in zip(prompt.starts, prompt.parts, strict=True)]


def _check(engine: Core, prompt: Prompt) -> None:
    engine._check(prompt.token_ids, len(prompt))
    if engine._crosses(len(prompt)):
        raise InvalidInput(
            f"a prompt of {len(prompt)} tokens is beyond the length of {engine.backend.spec.rope.switch_length} at "
            "which LongRoPE changes its frequencies; its KV cannot be handed over"
        )
