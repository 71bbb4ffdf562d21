"""Files made ready in advance, into which large entries are received where they will lie.

Asking the system for a file's pages costs several times what copying into them does. So files that nobody needs any
more are kept, with their pages and mapped into memory, and one is made in the background where none was left. A file
is reused only under an exclusive lock, which every reader's shared one excludes; a reader that opened it before finds,
once it has its lock, that the name means another file (``open_locked``).
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcomm.store.files import Files, lock, unlock

MIN_DRAFT_BYTES = 1 << 20
_GRAIN = 1 << 20
_LARGEST_WASTE = 2
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_ZEROS = memoryview(bytes(_GRAIN))


class Draft:
    """A temporary file of ``nbytes`` bytes and more, its pages all there. What is written to ``view`` is in the file.

    Nobody may write to the view once the draft is adopted or given back.
    """

    def __init__(self, path: Path, fd: int, room: mmap.mmap) -> None:
        self.path, self.fd, self._room = path, fd, room
        self.nbytes = self.capacity = len(room)
        self.adopted = False

    @property
    def view(self) -> memoryview:
        """The first ``nbytes`` bytes."""
        return memoryview(self._room)[: self.nbytes]

    def close(self) -> None:
        """Unmap and close."""
        with suppress(BufferError):  # a view is left in somebody's traceback; the mapping goes with it
            self._room.close()
        with suppress(OSError):
            os.close(self.fd)


class Drafts:
    """Files that are ready, at most ``max_bytes`` of them, and the thread that makes them. Thread-safe.

    Args:
        temporary: makes a new name in the store's folder for temporary files.
    """

    def __init__(self, files: Files, temporary: Callable[[], Path], max_bytes: int) -> None:
        self._files, self._temporary, self._max_bytes = files, temporary, max_bytes
        self._ready: list[Draft] = []
        self._work: deque[Callable[[], Draft | None]] = deque()
        self._coming = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def ready_bytes(self) -> int:
        """Bytes of files that are ready."""
        with self._changed:
            return sum(draft.capacity for draft in self._ready)

    def take(self, nbytes: int) -> Draft | None:
        """A draft of ``nbytes`` bytes, or None while none is ready; then, and where it was the last, one is made."""
        if nbytes < MIN_DRAFT_BYTES:
            return None
        with self._changed:
            fitting = [d for d in self._ready if nbytes <= d.capacity <= _LARGEST_WASTE * nbytes + _GRAIN]
            draft = min(fitting, key=lambda d: d.capacity, default=None)
            if draft is not None:
                self._ready.remove(draft)
                draft.nbytes = nbytes
        if len(fitting) < 2:
            size = -(-nbytes // _GRAIN) * _GRAIN
            self._later(size, lambda: self._made(size))
        return draft

    def give_back(self, draft: Draft) -> None:
        """A draft that was not adopted and that nobody writes to any more."""
        with self._changed:
            if not self._closed and self._held() + draft.capacity <= self._max_bytes:
                self._ready.append(draft)
                return
        self.discard(draft)

    def discard(self, draft: Draft) -> None:
        """Remove one for good."""
        draft.close()
        with suppress(OSError):
            self._files.unlink(draft.path)

    def let_go(self, draft: Draft) -> None:
        """Unmap one that was adopted, in the background: it takes as long as copying a part of it."""
        if not self._later(0, draft.close):
            draft.close()

    def adopt(self, draft: Draft, durable: bool) -> Path:
        """The draft's file, of just its bytes, for the caller to give its name; ``durable``: on the device. OSError."""
        draft.adopted = True
        unlock(draft.fd)
        if draft.nbytes < draft.capacity:
            os.ftruncate(draft.fd, draft.nbytes)
        if durable:
            self._files.fsync(draft.fd)
        return draft.path

    def reuse(self, path: Path) -> bool:
        """Make a draft of an entry's file, whose name goes; False if it is small, being read, or not wanted."""
        try:
            if os.lstat(path).st_size < MIN_DRAFT_BYTES:
                return False
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            size = -(-found.st_size // _GRAIN) * _GRAIN
            if (
                stat.S_ISREG(found.st_mode)
                and found.st_nlink == 1
                and self._room_for(size)
                and lock(fd, exclusive=True)
            ):
                hidden = self._temporary()
                self._files.rename(path, hidden)
                if self._later(size, lambda: self._mapped(hidden, fd, found.st_size, size)):
                    return True
                self._files.unlink(hidden)
                os.close(fd)
                return True
        except OSError:
            pass
        os.close(fd)
        return False

    def close(self) -> None:
        """Remove all."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)
        for draft in self._ready:
            self.discard(draft)
        self._ready.clear()

    def _held(self) -> int:
        return self._coming + sum(draft.capacity for draft in self._ready)

    def _room_for(self, size: int) -> bool:
        with self._changed:
            return not self._closed and self._held() + size <= self._max_bytes

    def _later(self, size: int, work: Callable[[], Draft | None]) -> bool:
        with self._changed:
            if self._closed or self._held() + size > self._max_bytes:
                return False
            self._coming += size

            def run() -> Draft | None:
                try:
                    return work()
                finally:
                    with self._changed:
                        self._coming -= size

            self._work.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcomm-drafts", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    if self._closed:
                        return
                    self._changed.wait()
                work = self._work.popleft()
            draft = None
            with suppress(OSError, ValueError):
                draft = work()
            if draft is not None:
                self.give_back(draft)

    def _made(self, size: int) -> Draft | None:
        path = self._temporary()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self._mapped(path, fd, 0, size)

    def _mapped(self, path: Path, fd: int, there: int, size: int) -> Draft | None:
        """Map a file of ``there`` bytes after giving it ``size``; written, not only reserved, so that a full disk is an
        error here and no signal later."""
        try:
            while there < size:
                there += os.pwrite(fd, _ZEROS[: min(_GRAIN, size - there)], there)
            room = mmap.mmap(fd, size)
            with suppress(OSError):
                for start in range(0, size, _GRAIN):  # in steps, for the interpreter is held meanwhile
                    room.madvise(_MADV_POPULATE_WRITE, start, min(_GRAIN, size - start))
            return Draft(path, fd, room)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                self._files.unlink(path)
            raise
