"""An entry's file: written whole under a temporary name, and opened so that it can be neither evicted nor mistaken."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import CorruptEntry
from kvcomm.store.codec import EntryWriter
from kvcomm.store.files import Files, lock, trouble


def write_entry(files: Files, temporary: Path, writer: EntryWriter, durable: bool) -> Path:
    """Write an entry to ``temporary``, and return that; nothing is left of a failure, which is an OSError."""
    fd = files.create(temporary)
    try:
        for buffers in writer:
            files.write(fd, buffers)
        if durable:
            files.fsync(fd)
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise
    finally:
        files.close(fd)
    return temporary


def open_locked(files: Files, path: Path, name: str) -> int | None:
    """The entry's file, open and locked against eviction; None if there is none.

    Raises:
        CorruptEntry: there lies something else than a regular file.
        StoreUnavailable: it cannot be opened.
    """
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
            raise CorruptEntry(f"in the place of entry {name[:16]} lies no file; it was set aside") from error
        with trouble(f"opening entry {name[:16]}"):
            raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        files.close(fd)
        raise CorruptEntry(f"in the place of entry {name[:16]} lies no regular file; it was set aside")
    if not lock(fd, exclusive=False) or not _is(path, fd):
        files.close(fd)
        return None
    return fd


def _is(path: Path, fd: int) -> bool:
    """Whether the name still means the open file, which may have become another entry's before it was locked."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False
