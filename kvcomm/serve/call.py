"""One call on one connection: what it was asked with, and how it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.serve.core import Core
from kvcomm.serve.value import Value
from kvcomm.store.base import Deadline
from kvcomm.transfer.auth import Grant
from kvcomm.transfer.frame import Kind, Preamble
from kvcomm.transfer.names import MAX_KEY_CHARS, read_fingerprint, read_key
from kvcomm.transfer.schema import Members
from kvcomm.transfer.wire import Wire
from kvcomm.types import ModelFingerprint, Namespace

MAX_LEASES = 8


@dataclass
class Leases:
    """The entries that one connection has pinned, at most eight; gone with the connection."""

    held: dict[int, Value] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def room(self) -> None:
        """Raise InvalidInput where no more fit."""
        if len(self.held) >= MAX_LEASES:
            raise InvalidInput(f"{len(self.held)} entries are pinned by this connection, the limit; release some")

    def add(self, value: Value) -> int:
        """Number of a new lease."""
        number = next(self._numbers)
        self.held[number] = value
        return number

    def find(self, number: int) -> Value:
        """The value of a lease. Raises StoreUnavailable."""
        found = self.held.get(number)
        if found is None:
            raise StoreUnavailable(f"lease {number} ended; get the entry again")
        return found

    def release(self, number: int) -> bool:
        """End one; whether it was there."""
        found = self.held.pop(number, None)
        if found is not None:
            found.release()
        return found is not None

    def close(self) -> None:
        """End all."""
        for number in list(self.held):
            self.release(number)


@dataclass
class Call:
    """What a call's function gets.

    Attributes:
        asked: the header's members, without ``call``; the function reads all of them.
        taken, lost: whether the payload was received, and whether that failed.
        answered: whether the last frame of an answer was begun, after which no refusal can follow.
    """

    core: Core
    grant: Grant
    wire: Wire
    leases: Leases
    preamble: Preamble
    asked: Members
    deadline: Deadline
    stopping: Callable[[], bool]
    taken: bool = False
    lost: bool = False
    answered: bool = False
    outcome: str = "ok"

    @property
    def namespace(self) -> Namespace:
        """The token's."""
        return Namespace(self.grant.namespace)

    def key(self) -> CacheKey:
        """The key that is asked about."""
        return read_key(self.asked.text("key", MAX_KEY_CHARS), self.namespace)

    def fingerprint(self) -> ModelFingerprint:
        """The model that is asked about."""
        return read_fingerprint(self.asked.text("fingerprint"))

    def left_s(self) -> float:
        """Seconds left, as a store's deadline."""
        return max(self.deadline.left(), 0.001)

    def payload_into(self, out: memoryview) -> None:
        """Receive the payload, which has just ``out``'s length."""
        self.taken = self.lost = True
        self.wire.payload_into(self.preamble, out, self.deadline)
        self.lost = False

    def payload(self) -> bytearray:
        """Receive the payload in fresh memory."""
        data = bytearray(self.preamble.payload_bytes)
        self.payload_into(memoryview(data))
        return data

    def no_payload(self) -> None:
        """Refuse a payload where none belongs, and members that nobody read."""
        if self.preamble.payload_bytes:
            raise InvalidInput(f"a payload of {self.preamble.payload_bytes} bytes came with a call that takes none")
        self.taken = True
        self.asked.end()

    def answer(self, header: Mapping[str, object] | None = None) -> None:
        """The answer, without payload."""
        self.answered = True
        self.wire.send(Kind.ANSWER, self.preamble.number, header or {}, self.deadline)

    def answer_pages(self, header: Mapping[str, object], pages: Iterable[bytes | memoryview]) -> None:
        """Frames with a page each, and an answer at their end."""
        for page in pages:
            self.wire.send(Kind.PART, self.preamble.number, {}, self.deadline, [memoryview(page)])
        self.answer(header)
