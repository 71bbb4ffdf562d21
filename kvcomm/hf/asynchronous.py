"""Calls from asyncio: each runs in a thread of its own, and cancelling its task stops the generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvcomm.hf.stopping import Cancellation

T = TypeVar("T")


async def in_thread(call: Callable[[Cancellation], T]) -> T:
    """Run ``call`` in a thread of the event loop's executor; it hands the Cancellation on as a stopping criterion.

    Where the awaiting task is cancelled, the generation stops at its next token (a prefill under way ends first), and
    only when its thread is done does the cancellation go on: the model, the pool and the memory are free then.
    """
    stop = Cancellation()
    work = asyncio.ensure_future(asyncio.to_thread(call, stop))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.cancel()
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:  # asked again; the thread cannot be left behind
                continue
        if not work.cancelled():
            work.exception()  # looked at, so that asyncio does not report it as lost
        raise
