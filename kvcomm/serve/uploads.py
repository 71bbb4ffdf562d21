"""Values on their way in: room reserved, parts received where they belong, all of it freed when the lease ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcomm.errors import InvalidInput, Overloaded, StoreUnavailable
from kvcomm.reuse.memory import BufferMemory
from kvcomm.store.codec import buffer_of

PART_BYTES = 8 << 20


@dataclass(eq=False)
class Upload:
    """One value on its way. ``parts`` that arrived; each part has ``PART_BYTES`` but the last."""

    namespace: str
    name: str
    nbytes: int
    ends: float
    lease_s: float
    data: memoryview
    parts: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether every part arrived."""
        return len(self.parts) == -(-self.nbytes // PART_BYTES)


class Uploads:
    """All values on their way, in memory reserved for them. Safe to use from several threads.

    Args:
        max_bytes: most bytes reserved at once; a namespace may take half of it.
        max_count: most uploads at once, and half of it for a namespace.
        clock: monotonic seconds.
    """

    def __init__(self, max_bytes: int, max_count: int = 1024, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._max_count, self._clock = max_bytes, max_count, clock
        self._held: dict[tuple[str, str], Upload] = {}
        self._memory = BufferMemory(min(max_bytes, 256 << 20))
        self._lock = threading.Lock()

    def begin(self, namespace: str, name: str, nbytes: int, lease_s: float) -> Upload:
        """Reserve room, or find what was reserved under that name and go on with it.

        Raises:
            InvalidInput: the value can never fit, or the name is taken by one of another size.
            Overloaded: there is no room now.
        """
        if not 0 < nbytes <= self._max_bytes // 2:
            raise InvalidInput(f"a value of {nbytes} bytes exceeds {self._max_bytes // 2}; split the segment")
        with self._lock:
            self._sweep()
            found = self._held.get((namespace, name))
            if found is None:
                self._check_room(namespace, nbytes)
                data = buffer_of(self._memory.take(nbytes))
                found = Upload(namespace, name, nbytes, 0.0, lease_s, data)
                self._held[namespace, name] = found
            elif found.nbytes != nbytes:
                raise InvalidInput(f"upload {name[:8]} has {found.nbytes} bytes, not {nbytes}; choose another name")
            found.ends = self._clock() + lease_s
            return found

    def find(self, namespace: str, name: str) -> Upload:
        """An upload that goes on. Raises StoreUnavailable where it ended."""
        with self._lock:
            self._sweep()
            found = self._held.get((namespace, name))
            if found is None:
                raise StoreUnavailable(f"upload {name[:8]} ended or was never begun; begin it again")
            return found

    @contextmanager
    def part(self, upload: Upload, number: int, nbytes: int) -> Iterator[memoryview]:
        """Where part ``number`` belongs; it counts as arrived if the block ends without an error.

        Raises:
            InvalidInput: there is no such part, or it has another size.
            Overloaded: the part is just arriving over another connection.
        """
        start = number * PART_BYTES
        wanted = min(PART_BYTES, upload.nbytes - start)
        if wanted != nbytes:
            raise InvalidInput(f"part {number} of {upload.nbytes} bytes has {nbytes}, not {wanted}; send it whole")
        with self._lock:
            if number in upload.arriving:
                raise Overloaded(f"part {number} is arriving over another connection; wait for it")
            upload.arriving.add(number)
            upload.parts.discard(number)
        try:
            yield upload.data[start : start + nbytes]
            with self._lock:
                upload.parts.add(number)
                upload.ends = self._clock() + upload.lease_s
        finally:
            with self._lock:
                upload.arriving.discard(number)

    def end(self, upload: Upload) -> None:
        """Forget one: it was stored, or given up."""
        with self._lock:
            if self._held.get((upload.namespace, upload.name)) is upload:
                del self._held[upload.namespace, upload.name]

    def reserved(self) -> tuple[int, int]:
        """(bytes, uploads) reserved now."""
        with self._lock:
            self._sweep()
            return sum(u.nbytes for u in self._held.values()), len(self._held)

    def _check_room(self, namespace: str, nbytes: int) -> None:
        mine = [u for u in self._held.values() if u.namespace == namespace]
        for held, part in ((list(self._held.values()), 1), (mine, 2)):
            used = sum(u.nbytes for u in held)
            if used + nbytes > self._max_bytes // part or len(held) >= self._max_count // part:
                raise Overloaded(
                    f"{len(held)} uploads have {used} of {self._max_bytes // part} bytes reserved, {nbytes} more do "
                    "not fit now; try again when some have ended"
                )

    def _sweep(self) -> None:
        now = self._clock()
        for key in [k for k, u in self._held.items() if u.ends <= now]:
            del self._held[key]
