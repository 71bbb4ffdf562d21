"""Values on their way in: room reserved, parts received where they belong, all of it freed when the lease ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvcomm.errors import InvalidInput, Overloaded, StoreUnavailable
from kvcomm.reuse.memory import BufferMemory
from kvcomm.serve.arriving import Arriving
from kvcomm.store.codec import buffer_of
from kvcomm.store.drafts import Draft, Drafts

PART_BYTES = 8 << 20


@dataclass(eq=False)
class Upload:
    """One value on its way. ``parts`` that arrived; each part has ``PART_BYTES`` but the last.

    Attributes:
        draft: the file that the value is received into; None where it is received into memory.
        closed: it is being kept, and takes no more parts.
    """

    namespace: str
    name: str
    nbytes: int
    ends: float
    lease_s: float
    data: memoryview
    checks: Arriving
    draft: Draft | None = None
    closed: bool = False
    parts: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether every part arrived."""
        return len(self.parts) == -(-self.nbytes // PART_BYTES)

    @property
    def here(self) -> int:
        """Bytes from the beginning on of which none is missing."""
        parts = 0
        while parts in self.parts:
            parts += 1
        return min(parts * PART_BYTES, self.nbytes)


class Uploads:
    """All values on their way, in memory reserved for them or in files made ready. Safe to use from several threads.

    Args:
        max_bytes: most bytes reserved at once; a namespace may take half of it.
        max_count: most uploads at once, and half of it for a namespace.
        drafts: of the store that will keep the entries; None to receive them into memory.
        clock: monotonic seconds.
    """

    def __init__(
        self, max_bytes: int, max_count: int = 1024, *, drafts: Drafts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._max_bytes, self._max_count, self._clock = max_bytes, max_count, clock
        self._held: dict[tuple[str, str], Upload] = {}
        self._memory = BufferMemory(min(max_bytes, 256 << 20))
        self._drafts = drafts
        self._checkers = ThreadPoolExecutor(2, "check")
        self._lock = threading.Lock()

    def begin(self, namespace: str, name: str, nbytes: int, lease_s: float, *, entry: bool = False) -> Upload:
        """Reserve room, or find what was reserved under that name and go on with it.

        Args:
            entry: it is an entry, which may be received into a file of the store.

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
                draft = self._drafts.take(nbytes) if entry and self._drafts is not None else None
                data = buffer_of(self._memory.take(nbytes)) if draft is None else draft.view
                found = Upload(namespace, name, nbytes, 0.0, lease_s, data, Arriving(data, namespace), draft)
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
            if number in upload.arriving or upload.closed:
                raise Overloaded(f"part {number} is arriving over another connection, or being kept; wait for it")
            if self._held.get((upload.namespace, upload.name)) is not upload:
                raise StoreUnavailable(f"upload {upload.name[:8]} ended; begin it again")
            upload.arriving.add(number)
            if number in upload.parts:
                upload.parts.discard(number)
                upload.checks = Arriving(upload.data, upload.namespace)
        try:
            yield upload.data[start : start + nbytes]
            with self._lock:
                upload.parts.add(number)
                upload.ends = self._clock() + upload.lease_s
                here, checks = upload.here, upload.checks
        finally:
            with self._lock:
                upload.arriving.discard(number)
        if upload.draft is not None or upload.nbytes > PART_BYTES:
            with suppress(RuntimeError):  # the service is stopping
                self._checkers.submit(checks.advance, here)

    @contextmanager
    def whole(self, namespace: str, name: str) -> Iterator[Upload]:
        """An upload all of whose parts arrived, which takes no more of them inside; ended unless the block fails.

        Raises:
            StoreUnavailable: it ended, or parts are missing.
            Overloaded: it is being kept already, or a part of it is arriving again.
        """
        upload = self.find(namespace, name)
        with self._lock:
            if upload.closed or upload.arriving:
                raise Overloaded(f"upload {name[:8]} is being kept, or arriving, over another connection; wait for it")
            if not upload.whole:
                raise StoreUnavailable(
                    f"upload {name[:8]} has {len(upload.parts)} parts, more are missing; begin it again"
                )
            upload.closed = True
        try:
            yield upload
        except BaseException:
            upload.closed = False
            if upload.draft is not None and upload.draft.adopted:
                self.end(upload)
            raise
        self.end(upload)

    def end(self, upload: Upload) -> None:
        """Forget one: it was stored, or given up."""
        with self._lock:
            self._drop(upload)

    def close(self) -> None:
        """Forget all."""
        self._checkers.shutdown(cancel_futures=True)
        with self._lock:
            for upload in list(self._held.values()):
                self._drop(upload)

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
        for upload in [u for u in self._held.values() if u.ends <= now and not u.closed]:
            self._drop(upload)

    def _drop(self, upload: Upload) -> None:
        """Take one out; its file can be used again only if nobody is just writing to it."""
        if self._held.get((upload.namespace, upload.name)) is not upload:
            return
        del self._held[upload.namespace, upload.name]
        if upload.draft is None or self._drafts is None:
            return
        if upload.draft.adopted:
            self._drafts.let_go(upload.draft)
        elif upload.arriving:
            self._drafts.discard(upload.draft)
        else:
            self._drafts.give_back(upload.draft)
