"""Every file operation of the disk tier, in one place, so that a test can fail, lose or kill at each of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcomm.errors import StoreUnavailable

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Files:
    """The operating system's files. All methods raise OSError."""

    def point(self, name: str) -> None:
        """A named step that is no file operation; fault layers act on it."""

    def create(self, path: Path) -> int:
        """Open a new file for writing, 0600; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> None:
        """Append all bytes of all buffers."""
        left = [b.cast("B") for b in buffers if b.nbytes]
        while left:
            done = os.writev(fd, left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left and done:
                left[0] = left[0][done:]

    def fsync(self, fd: int) -> None:
        """Wait until the file's bytes are on the device."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close; never raises."""
        with suppress(OSError):
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give the file its final name, in one step."""
        os.rename(source, target)

    def fsync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_folder(self, path: Path) -> None:
        """Create the folder 0700 if it is not there."""
        with suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)

    def open(self, path: Path) -> int:
        """Open for reading without following a link, and without waiting on a FIFO."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def readv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from ``offset``; the number of bytes read, fewer only at the file's end."""
        total = os.preadv(fd, buffers, offset)
        wanted = sum(map(len, buffers))
        if total in (0, wanted):
            return total
        left, done = list(buffers), total
        while True:
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left and done:
                left[0] = left[0][done:]
            if not left:
                break
            done = os.preadv(fd, left, offset + total)
            if done == 0:
                break
            total += done
        return total

    def unlink(self, path: Path) -> None:
        """Remove the name; no error if it is not there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def scan(self, path: Path) -> Iterator[os.DirEntry[str]]:
        """What a folder holds; nothing if it is not there."""
        try:
            with os.scandir(path) as found:
                yield from list(found)
        except FileNotFoundError:
            return


def lock(fd: int, exclusive: bool) -> bool:
    """Try to lock an open file among processes and threads; False if another holds it. Ends when ``fd`` is closed."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """End a lock while the file stays open. Raises OSError."""
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def trouble(what: str) -> Iterator[None]:
    """Turn an OSError into StoreUnavailable, saying what could not be done."""
    try:
        yield
    except OSError as error:
        reason = f"{type(error).__name__} {error.errno}: {error.strerror}"
        raise StoreUnavailable(f"{what} failed ({reason}); check the disk's space, health and permissions") from error


def write_whole(files: Files, temporary: Path, target: Path, data: bytes) -> None:
    """Durably replace ``target``: at every moment it holds the old bytes or the new ones. Raises OSError."""
    fd = files.create(temporary)
    try:
        files.write(fd, [memoryview(data)])
        files.fsync(fd)
        files.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            files.unlink(temporary)
        raise
    finally:
        files.close(fd)
    files.fsync_folder(target.parent)
