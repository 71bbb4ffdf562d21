"""Named blobs as files: written aside, fsynced, renamed. A bad one is set aside and raised once, then a miss."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, MAX_BLOB_BYTES, MAX_BLOBS, Blobs, Owner, check_name
from kvcomm.store.files import lock, trouble, write_whole
from kvcomm.store.folder import Folder
from kvcomm.store.seal import Keyring
from kvcomm.store.statistics import BLOB_HEAD_BYTES, decode_blob, encode_blob
from kvcomm.types import Namespace

_SUFFIX = ".kvs"


class FileBlobs(Blobs):
    """Blobs below ``blobs/namespace/fingerprint`` of a store's folder."""

    def __init__(self, folder: Folder, keyring: Keyring | None) -> None:
        self._folder, self._files, self._keyring = folder, folder.files, keyring

    def read(self, owner: Owner, name: str) -> bytes | None:
        path = self._path(owner, name)
        with trouble(f"reading blob {name}"):
            try:
                fd = self._files.open(path)
            except FileNotFoundError:
                return None
            try:
                size = os.fstat(fd).st_size
                if size > MAX_BLOB_BYTES + BLOB_HEAD_BYTES:
                    raise CorruptEntry(f"blob {name} of {size} bytes exceeds {MAX_BLOB_BYTES}; it is not used")
                raw = bytearray(size)
                self._files.readv(fd, [memoryview(raw)], 0)
                return decode_blob(owner, name, bytes(raw), self._keyring)
            except (CorruptEntry, IsADirectoryError) as error:
                self._folder.set_aside(path)
                raise CorruptEntry(f"blob {name} was set aside: {error}") from error
            finally:
                self._files.close(fd)

    def update(
        self, owner: Owner, name: str, merge: Callable[[bytes | None], bytes], *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        path, deadline = self._path(owner, name), Deadline(deadline_s)
        with trouble(f"writing blob {name}"):
            self._folder.make(path.parent, again=not path.parent.is_dir())
            if not path.exists() and sum(1 for _ in self.names(owner)) >= MAX_BLOBS:
                raise InvalidInput(f"blob {name} would be one more than {MAX_BLOBS}; delete one")
            gate = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                while not lock(gate, exclusive=True):
                    if not deadline.left():
                        raise deadline.error(f"another update of blob {name}")
                    time.sleep(0.005)
                old = None
                with suppress(CorruptEntry):
                    old = self.read(owner, name)
                data = encode_blob(owner, name, bytes(merge(old)), self._keyring)
                write_whole(self._files, self._folder.temporary(), path, data)
            finally:
                os.close(gate)

    def delete(self, owner: Owner, name: str) -> bool:
        path = self._path(owner, name)
        with trouble(f"deleting blob {name}"):
            if not path.exists():
                return False
            self._files.unlink(path)
            self._files.fsync_folder(path.parent)
            return True

    def delete_namespace(self, namespace: Namespace) -> None:
        top = self._folder.root / "blobs" / namespace.name
        with trouble(f"deleting the blobs of {namespace}"):
            self._folder.remove_tree(top)

    def names(self, owner: Owner) -> Iterator[str]:
        for item in self._files.scan(self._path(owner, "x").parent):
            if item.name.endswith(_SUFFIX):
                yield item.name.removesuffix(_SUFFIX)

    def _path(self, owner: Owner, name: str) -> Path:
        namespace, fingerprint = owner
        top = self._folder.root / "blobs" / namespace.name / fingerprint.digest[:16]
        return top / (check_name(name) + _SUFFIX)
