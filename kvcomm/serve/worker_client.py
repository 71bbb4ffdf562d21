"""Asking a worker: for an answer, or for a prompt's KV into an engine's pool or into the store."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.errors import InvalidInput, KVCommError, StoreUnavailable
from kvcomm.hf.handover import Expected
from kvcomm.reuse.prompt import Prompt
from kvcomm.store.base import Deadline
from kvcomm.transfer.address import Address
from kvcomm.transfer.client import Client, Connection
from kvcomm.transfer.frame import MAX_DEADLINE_MS, MAX_PART_BYTES, Kind
from kvcomm.transfer.layers import receive_layer
from kvcomm.transfer.names import fingerprint_text
from kvcomm.types import ModelFingerprint, Segment, pack_tokens

if TYPE_CHECKING:
    from kvcomm.hf.core import Core

log = logging.getLogger(__name__)
MAX_PARTS = 1024
DEADLINE_S = 120.0


@dataclass(frozen=True)
class WorkerReply:
    """A worker's answer; ``reused`` of the ``prompt_tokens`` it did not compute. ``ttft_s`` is its own clock's."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused: int
    ttft_s: float


class WorkerClient:
    """A worker at an address, in one namespace. Safe to use from several threads.

    Args:
        token: for a worker that has tokens; without one the worker believes the namespace.
    """

    def __init__(
        self, address: str, namespace: str = "default", *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._client = Client(Address.parse(address), namespace, token or namespace, tls=tls)

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int, label: str = "", deadline_s: float = DEADLINE_S
    ) -> WorkerReply:
        """A greedy answer. Raises KVCommError: what the worker refused with, or that it did not answer."""
        header = {"call": "generate", "max_new_tokens": max_new_tokens, "label": label, **_header(prompt)}
        deadline = _deadline(deadline_s)
        answer = self._client.call(header, deadline, [_payload(prompt)])
        found, ids = answer.header, Segment.from_bytes(bytes(answer.payload)).token_ids
        return WorkerReply(
            ids, found.integer("prompt_tokens", 1, 2**32), found.integer("reused", 0, 2**32), found.number("ttft_s"),
        )  # fmt: skip

    def prefill(self, engine: Core, prompt: Prompt, *, deadline_s: float = DEADLINE_S) -> None:
        """Have a prompt's exact KV come into the engine's pool. Returns at once; calls of the engine may begin.

        They use the layers as they come. If these do not come, or the deadline passes, the engine computes the text.
        """
        deadline = _deadline(deadline_s)
        expected = Expected(engine, prompt, deadline)
        if expected.rooms:
            header = {"call": "prefill", "fingerprint": fingerprint_text(engine.pool.fingerprint),
                      "first": expected.first, "push": True, **_header(prompt)}  # fmt: skip
            given = (expected, header, _payload(prompt), deadline)
            try:
                threading.Thread(target=self._receive, args=given, name="prefill", daemon=True).start()
            except RuntimeError as error:  # as many threads as the system allows
                expected.lose(StoreUnavailable(f"no thread to receive a prefill with ({error}); compute it here"))

    def prefill_to_store(self, model: ModelFingerprint, prompt: Prompt, *, deadline_s: float = DEADLINE_S) -> None:
        """Have a prompt's exact KV put into the worker's store; it is there on return. Raises KVCommError."""
        header = {"call": "prefill", "fingerprint": fingerprint_text(model), "first": 0, "push": False}
        self._client.call({**header, **_header(prompt)}, _deadline(deadline_s), [_payload(prompt)])

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._client.close()

    def _receive(self, expected: Expected, header: dict[str, object], payload: memoryview, deadline: Deadline) -> None:
        def work(connection: Connection) -> KVCommError | None:
            number, here = connection.send(header, deadline, [payload]), 0
            try:
                for room in expected.rooms:
                    receive_layer(connection, number, room, deadline)
                    expected.arrive()
                    here += 1
                preamble, _ = connection.next(number, deadline)
                connection.broken = preamble.kind is not Kind.ANSWER or preamble.payload_bytes > 0
            except KVCommError as error:
                connection.broken = True  # whatever still comes is of this answer
                if not here:
                    raise
                return error  # not to be asked for again: some of it was used
            return None

        try:
            error = self._client.run(work, deadline)
        except KVCommError as refused:
            error = refused
        except BaseException as failed:
            expected.lose(StoreUnavailable(f"receiving a prefill failed ({type(failed).__name__})"))
            raise
        if error is not None:
            log.warning("a prefill from %s is not used from here on: %s", self._client.address, error)
            expected.lose(error)


def _deadline(seconds: float) -> Deadline:
    if seconds * 1000 > MAX_DEADLINE_MS:
        raise InvalidInput(f"deadline_s {seconds} exceeds {MAX_DEADLINE_MS // 1000}; ask for less")
    return Deadline(seconds)


def _header(prompt: Prompt) -> dict[str, object]:
    if len(prompt.parts) > MAX_PARTS:
        raise InvalidInput(f"a prompt of {len(prompt.parts)} parts exceeds {MAX_PARTS}; join some of them")
    return {"labels": [p.label for p in prompt.parts], "lengths": [len(p.segment) for p in prompt.parts]}


def _payload(prompt: Prompt) -> memoryview:
    data = pack_tokens(prompt.token_ids)
    if len(data) > MAX_PART_BYTES:
        raise InvalidInput(f"a prompt of {len(prompt)} tokens exceeds {MAX_PART_BYTES // 4}; shorten it")
    return memoryview(data)
