"""Looking after a disk tier's folder: making the index from the files, listing, verifying, sweeping."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import CorruptEntry, StoreError, StoreUnavailable
from kvcomm.store.base import Deadline, Listing
from kvcomm.store.codec import EntryReader
from kvcomm.store.disk_handle import FileSource
from kvcomm.store.files import lock, trouble
from kvcomm.store.folder import Folder
from kvcomm.store.index import Index, Row
from kvcomm.store.seal import Keyring, opaque
from kvcomm.store.tally import Tally
from kvcomm.types import ModelFingerprint, Namespace

INDEX = "index.sqlite"
Found = tuple[Path, str, Listing | None, StoreError | None]


class Upkeep:
    """Opens the folder's index, rebuilding it if it is broken and nobody else has the folder open.

    On a disk that is full to the last byte SQLite cannot open its file. Then the account is kept in memory and the
    store is ``read_only``: what is held can be read and deleted, and nothing be put.

    Raises:
        StoreUnavailable: the index is broken and others have the folder open.
        OSError: the file system failed.
    """

    def __init__(self, folder: Folder, keyring: Keyring | None, tally: Tally, deadline: Deadline) -> None:
        self._folder, self._files, self._keyring, self._tally = folder, folder.files, keyring, tally
        self.read_only = False
        path = folder.root / INDEX
        try:
            self.index = self._open(path, deadline)
        except (StoreUnavailable, OSError) as error:
            if _full(error):
                self.read_only = True
                self.index = self._open(Path(":memory:"), deadline)
            elif isinstance(error, OSError):
                raise
            elif not folder.alone:
                raise StoreUnavailable(f"{error}; close every other process that uses {folder.root}, reopen") from error
            else:
                for ending in ("", "-wal", "-shm"):
                    (folder.root / (INDEX + ending)).unlink(missing_ok=True)
                self.index = self._open(path, deadline)
                tally.add("", "index_rebuilt")

    def _open(self, path: Path, deadline: Deadline) -> Index:
        if path.is_absolute():
            self._private(path)
        index = Index(path, deadline)
        try:
            self._reconcile(index, deadline)
        except BaseException:
            index.close()
            raise
        return index

    @staticmethod
    def _private(path: Path) -> None:
        """SQLite gives its log the mode of the index, so the index exists 0600 before SQLite sees it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        os.close(fd)

    def _reconcile(self, index: Index, deadline: Deadline) -> int:
        """Make the index agree with the files, setting aside what is no entry; rows that changed."""
        known = index.sizes(deadline)
        found: dict[str, Row] = {}
        for path, namespace in self._paths(None, None):
            if known.get(path.name) == _size(path):
                found[path.name] = self._row(path, namespace, None, known[path.name])
                continue
            listing, error = self._head(path, namespace)
            if isinstance(error, CorruptEntry):
                self.set_aside(path, namespace)
            elif listing is not None:
                found[path.name] = self._row(path, namespace, listing, listing.nbytes)
        return index.reconcile(found, lambda row: os.path.lexists(self._place(row)), self._folder.alive, deadline)

    def heads(self, namespace: Namespace | None, fingerprint: ModelFingerprint | None) -> Iterator[Found]:
        """(path, namespace, listing or None, error or None) of every file, from its header alone."""
        for path, name in self._paths(namespace, fingerprint):
            listing, error = self._head(path, name)
            if listing is None and error is None:
                continue
            if fingerprint is None or listing is None or listing.key.fingerprint == fingerprint:
                yield path, name, listing, error

    def verify(self) -> Iterator[Found]:
        """Read and check every byte of every entry; what fails is set aside."""
        for path, namespace in self._paths(None, None):
            listing, error = self._head(path, namespace, whole=True)
            if isinstance(error, CorruptEntry):
                self.set_aside(path, namespace)
                with suppress(StoreError):
                    self.index.remove(path.name, Deadline(1.0))
            if listing is not None or error is not None:
                yield path, namespace, listing, error

    def sweep(self, deadline: Deadline) -> dict[str, int]:
        """Clear up; counts of left-over files removed, index rows put right, and things set aside that were removed."""
        with trouble(f"clearing up {self._folder.root}"):
            left_over, rows = self._folder.sweep(), self._reconcile(self.index, deadline)
            return {"left_over": left_over, "index_rows": rows, "set_aside": self._folder.empty_aside()}

    def count(self) -> int:
        """Files in the folder's entries."""
        return sum(1 for _ in self._paths(None, None))

    def set_aside(self, path: Path, namespace: str) -> None:
        """Move a bad file out of the way and count it."""
        with suppress(OSError):
            self._folder.set_aside(path)
        self._tally.add(namespace, "corrupt")

    def _paths(self, namespace: Namespace | None, fingerprint: ModelFingerprint | None) -> Iterator[tuple[Path, str]]:
        for top in self._files.scan(self._folder.root / "entries"):
            if (namespace is not None and top.name != namespace.name) or not top.is_dir(follow_symlinks=False):
                continue
            for middle in self._files.scan(Path(top.path)):
                wanted = fingerprint is None or middle.name == fingerprint.digest[:16]
                if wanted and middle.is_dir(follow_symlinks=False):
                    for item in self._files.scan(Path(middle.path)):
                        yield Path(item.path), top.name

    def _head(self, path: Path, namespace: str, whole: bool = False) -> tuple[Listing | None, StoreError | None]:
        try:
            if not path.is_file() or path.is_symlink():
                if not os.path.lexists(path):
                    return None, None
                return None, CorruptEntry(f"{path.name[:16]} is no regular file")
            fd = self._files.open(path)
        except FileNotFoundError:
            return None, None
        except OSError as error:
            return None, StoreUnavailable(f"{path.name[:16]} does not open: {error.strerror}; check the disk")
        try:
            if not lock(fd, exclusive=False):
                return None, None
            reader = EntryReader(FileSource(self._files, fd, os.fstat(fd).st_size), namespace, None, self._keyring)
            if reader.head.key.fingerprint.digest[:16] != path.parent.name or reader.name != path.name:
                return None, CorruptEntry(f"{path.name[:16]} holds another entry than its place says")
            if whole:
                reader.verify()
            head = reader.head
            return Listing(
                head.key, head.tokens, reader.nbytes, head.encoding, head.attributes, head.created_s, head.expires_s
            ), None
        except StoreError as error:
            return None, error
        finally:
            self._files.close(fd)

    def _row(self, path: Path, namespace: str, listing: Listing | None, nbytes: int) -> Row:
        if listing is None:
            return Row(path.name, namespace, path.parent.name, "", 0, nbytes, 0.0, 0.0, 0, None, "")
        kept, made = listing.attributes, listing.created_s
        group = opaque(self._keyring, namespace, kept.group) if kept.group else ""
        priority, expires = int(kept.priority), listing.expires_s
        return Row(path.name, namespace, path.parent.name, group, priority, nbytes, made, made, 0, expires, "")

    def _place(self, row: Row) -> Path:
        return self._folder.entries(row.namespace, row.folder) / row.name


def _size(path: Path) -> int | None:
    """Bytes of a file, None if it is gone."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def _full(error: BaseException) -> bool:
    """Whether the file system had no room left."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return getattr(cause, "errno", None) == errno.ENOSPC or "disk is full" in str(cause) or "I/O error" in str(cause)
