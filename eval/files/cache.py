"""The user's cache directory, and a lock so that two processes do not make the same thing twice."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcomm.errors import DeadlineExceeded

LOCK_TIMEOUT_S = 900.0


def cache_dir(kind: str) -> Path:
    """``$XDG_CACHE_HOME/kvcomm/<kind>`` (``~/.cache`` where that is not set), made if needed."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    folder = base / "kvcomm" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(target: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of ``target`` (a file beside it); the kernel frees it if this process dies.

    Raises:
        DeadlineExceeded: another process held it for ``timeout_s`` seconds.
    """
    lock = target.with_name(target.name + ".lock")
    deadline = time.monotonic() + timeout_s
    with open(lock, "a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"another process has held {lock} for {timeout_s:.0f} s, the limit; "
                        "wait for it to finish or end it"
                    ) from None
                time.sleep(0.1)
        yield
