"""One put into Redis: parts first, under names that nobody knows, then the manifest, which makes them an entry."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvcomm.errors import StoreError, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.store.codec import EntryWriter
from kvcomm.transfer.redis_calls import Calls
from kvcomm.transfer.redis_lookup import Place
from kvcomm.transfer.redis_value import GRACE_S, Manifest, split_lead

STAGED_S = 60.0  # beyond the deadline; what a writer that died left over goes by itself then


class Upload:
    """Brings one entry into Redis.

    Args:
        place: where it is to lie.
        expires_s: Unix time at which the entry ends, or None.
        room: as large as a part, for the pieces that become one; kept by the caller, as fresh memory costs as much.
    """

    def __init__(
        self, calls: Calls, place: Place, writer: EntryWriter, expires_s: float | None, room: bytearray,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._calls, self._expires_s, self._room, self._clock = calls, expires_s, room, clock
        self._lead, self._rest = split_lead(writer)
        self._manifest = Manifest(secrets.token_bytes(16), writer.nbytes, len(self._lead), len(room))
        self._key, self._parts = place.key, place.parts(self._manifest)

    def run(self, deadline: Deadline) -> bool:
        """True when the entry is held; False if another put came first.

        Raises:
            StoreUnavailable: nothing is held. StoreFull if it is for want of memory.
        """
        try:
            self._send_parts(deadline)
            if not self._commit(deadline):
                self._abandon()
                return False
            self._keep_parts(deadline)
        except BaseException:
            self._abandon()
            raise
        return True

    def _send_parts(self, deadline: Deadline) -> None:
        staged_ms = int((deadline.left() + STAGED_S) * 1000)
        for number, piece in enumerate(self._pieces()):
            command = ("SET", self._parts[number], piece, "PX", staged_ms)
            self._calls.run("writing a part", lambda client, c=command: client.execute_command(*c), deadline)  # type: ignore[misc]

    def _pieces(self) -> Iterator[memoryview]:
        """The rest of the entry in pieces as large as ``room``, which they lie in until the next one is asked for."""
        room, used = memoryview(self._room), 0
        for buffer in self._rest:
            at = 0
            while at < len(buffer):
                step = min(len(buffer) - at, len(room) - used)
                room[used : used + step] = buffer[at : at + step]
                at, used = at + step, used + step
                if used == len(room):
                    yield room
                    used = 0
        if used:
            yield room[:used]

    def _commit(self, deadline: Deadline) -> bool:
        fixed = self._manifest.encode()
        command: list[object] = ["SET", self._key, fixed + self._lead, "NX"]
        if self._expires_s is not None:
            command += ["PX", self._left_ms(0)]
        if self._calls.run("committing", lambda client: client.execute_command(*command), deadline):
            return True
        # The first of two attempts may have set it before its answer was lost.
        read = ("GETRANGE", self._key, 0, len(fixed) - 1)
        return bool(self._calls.run("committing", lambda client: client.execute_command(*read), deadline) == fixed)

    def _keep_parts(self, deadline: Deadline) -> None:
        """Give the parts the entry's time to live; all must still be there."""
        commands: list[tuple[object, ...]] = []
        for key in self._parts:
            stay = ("PERSIST", key) if self._expires_s is None else ("PEXPIRE", key, self._left_ms(GRACE_S))
            commands += [stay, ("EXISTS", key)]
        if not all(self._calls.batch("committing", commands, deadline)[1::2]):
            raise StoreUnavailable(
                "Redis dropped parts of the entry while it was written: it holds less than the entry, or somebody "
                "deleted it meanwhile; raise its maxmemory, or put again"
            )

    def _abandon(self) -> None:
        """Take back what was written; if the server is gone, the parts go by themselves and the manifest is a miss."""
        deadline = Deadline(1.0)
        with suppress(StoreError):
            self._calls.remove_if(self._key, self._manifest.encode(), deadline)
            self._calls.batch("taking back", [("UNLINK", key) for key in self._parts], deadline)

    def _left_ms(self, more_s: float) -> int:
        if self._expires_s is None:
            raise ValueError("an entry without an end has no time left")
        return max(1, math.ceil((self._expires_s - self._clock() + more_s) * 1000))
