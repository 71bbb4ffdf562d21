"""KV over a connection layer after layer, as it is computed: PART frames of up to 8 MiB, each with its checksum.

A layer's bytes are, text by text, its keys and then its values, [kv heads, tokens, head_dim] each, unrotated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcomm.errors import ProtocolError
from kvcomm.store.base import Deadline
from kvcomm.store.codec import buffer_of
from kvcomm.transfer.client import Connection
from kvcomm.transfer.frame import Kind, payload_check
from kvcomm.transfer.wire import Wire, cut

PART_BYTES = 8 << 20


def send_layer(wire: Wire, number: int, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
    """Send contiguous host tensors as parts of the answer to request ``number``; errors as of ``Wire.send``."""
    buffers = [buffer_of(tensor) for tensor in tensors]
    for at in range(0, sum(map(len, buffers)), PART_BYTES):
        wire.send(Kind.PART, number, None, deadline, cut(buffers, at, PART_BYTES))


def receive_layer(connection: Connection, number: int, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
    """Receive what ``send_layer`` sent into contiguous host tensors of just that size.

    Raises:
        KVCommError: it was refused, did not come, or failed its check; the tensors hold anything then.
    """
    buffers = [buffer_of(tensor) for tensor in tensors]
    at, end = 0, sum(map(len, buffers))
    while at < end:
        preamble, _ = connection.next(number, deadline)
        with connection.breaking():
            size = preamble.payload_bytes
            if preamble.kind is not Kind.PART or not preamble.checked or not 0 < size <= end - at:
                raise ProtocolError(f"{size} bytes came where {end - at} of a layer are missing; it is closed")
            views = cut(buffers, at, size)
            connection.wire.fill(views, deadline)
            if payload_check(views) != preamble.check:
                raise ProtocolError(f"{size} bytes of a layer fail their checksum; the connection is over")
            at += size
