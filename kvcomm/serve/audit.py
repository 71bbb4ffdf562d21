"""The audit log: one JSON line for each administrative act, on disk when ``write`` returns.

A line says who (a token's id, or ``local``), what, when and to which namespace. It holds no text, no token ids of a
model and no secret: acts and their facts are a closed list, and a fact is a number or a short name.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import InvalidInput, KVCommError
from kvcomm.store.files import trouble
from kvcomm.transfer.auth import Grant

log = logging.getLogger(__name__)
ACTS = frozenset(
    (
        "service_start", "service_stop", "token_create", "token_revoke", "token_purge", "delete_namespace",
        "delete_group", "delete", "forget", "retire_node", "access_denied",
    )
)  # fmt: skip
FACTS = frozenset(
    (
        "address", "bytes", "count", "entries", "expires_s", "key", "nodes", "reason", "right", "rights", "signal",
        "token", "version",
    )
)  # fmt: skip
MAX_BYTES = 8 << 20
KEEP = 8
_NAME = re.compile(r"[A-Za-z0-9/:\[][A-Za-z0-9._:/@+,\[\]-]{0,127}")


class AuditLog:
    """An append-only file of mode 0600, which several processes may write to.

    When it exceeds ``max_bytes`` it becomes ``PATH.1``, that ``PATH.2``, and so on; ``keep`` of them stay.

    Raises:
        InvalidInput: ``max_bytes`` is below 4,096 or ``keep`` below 1.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP, clock: Callable[[], float] = time.time
    ) -> None:
        if max_bytes < 4096 or keep < 1:
            raise InvalidInput(f"max_bytes {max_bytes} and keep {keep} must be at least 4096 and 1; raise them")
        self.path, self._max_bytes, self._keep, self._clock = path, max_bytes, keep, clock
        self._lock = threading.Lock()

    def write(self, act: str, who: str, namespace: str = "", **facts: str | int | float) -> None:
        """Append a line and wait until it is on the device.

        Args:
            act: one of ACTS.
            who: a token's id, or ``local`` for those who may open the service's private socket or files.
            facts: names from FACTS; numbers, or up to 128 characters as names and addresses have them.

        Raises:
            InvalidInput: an act, fact or value outside these; nothing was written.
            StoreUnavailable: the line is not on disk; leave the act undone, or undo it.
        """
        line = {"time": round(self._clock(), 3), "act": act, "who": who, "namespace": namespace, **facts}
        unknown = sorted(set(facts) - FACTS)
        if act not in ACTS or unknown:
            raise InvalidInput(f"audit act {act[:40]!r} with facts {unknown[:5]} is not on the list; extend the list")
        for name, value in line.items():
            if isinstance(value, str) and value and not _NAME.fullmatch(value):
                raise InvalidInput(f"audit fact {name} of {len(value)} characters is no name; content is not logged")
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock, trouble(f"writing the audit log {self.path}"):
            gate = os.open(self._beside("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(gate, fcntl.LOCK_EX)
                self._append(data)
            finally:
                os.close(gate)

    def admin(self, act: str, grant: Grant, facts: dict[str, str | int]) -> None:
        """``write`` for an act that came over a connection."""
        self.write(act, grant.token_id or "local", grant.namespace, **facts)

    def _append(self, data: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and size + len(data) > self._max_bytes:
                os.close(fd)
                self._rotate()
                fd, size = os.open(self.path, flags, 0o600), 0
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data  # a line that a crash cut short stays a line of its own
            if os.write(fd, data) != len(data):
                raise OSError(28, "the line was cut short")
            os.fsync(fd)
        finally:
            os.close(fd)
        if not size:
            self._fsync_folder()

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.rename(self._beside(str(number)), self._beside(str(number + 1)))
        os.rename(self.path, self._beside("1"))
        self._fsync_folder()

    def _fsync_folder(self) -> None:
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _beside(self, end: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{end}")


class Denials:
    """Writes refused accesses down, at most one line a second with how many it stands for: a flood fills no disk."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit, self._clock = audit, clock
        self._lock = threading.Lock()
        self._count, self._next = 0, 0.0

    def __call__(self, who: str, namespace: str, call: str) -> None:
        """Count one; never raises, since the caller is about to refuse anyway."""
        with self._lock:
            self._count += 1
            if self._clock() < self._next:
                return
            count, self._count, self._next = self._count, 0, self._clock() + 1.0
        try:
            self._audit.write("access_denied", who, namespace, reason=call, count=count)
        except KVCommError as error:
            log.warning("a refused access was not written down: %s", error)
