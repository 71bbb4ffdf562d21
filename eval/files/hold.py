"""A file that one process at a time may use; the kernel lets go of it when that process ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import InvalidInput

_held: dict[Path, int] = {}
"""Descriptors that carry locks, which belong to this process: it may hold a file as often as it likes."""


def hold(path: Path) -> None:
    """Make the file if needed and hold it until ``release`` or the end of this process.

    Raises:
        InvalidInput: another process holds it, or it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path in _held and _is(path, _held[path]):
        return
    release(path)
    while True:
        handle = _opened(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InvalidInput(
                f"{path} is in use by another run with the same output; wait for it to end, or give another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        if _is(path, handle):
            if not _held:
                atexit.register(_release_all)
            _held[path] = handle
            return
        os.close(handle)  # the other run ended and removed the file in the meantime


def release(path: Path) -> None:
    """Let go of the file; where it is still empty it is removed."""
    path = Path(os.path.realpath(path))
    handle = _held.pop(path, None)
    if handle is None:
        return
    with suppress(OSError):
        if os.fstat(handle).st_size == 0 and _is(path, handle):
            path.unlink()
    os.close(handle)


def _release_all() -> None:
    for path in list(_held):
        release(path)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written ({error.strerror}); choose another --out") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidInput(f"{path} is no regular file; remove it, or choose another --out")
    return handle


def _is(path: Path, handle: int) -> bool:
    """Whether the path still names the opened file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False
