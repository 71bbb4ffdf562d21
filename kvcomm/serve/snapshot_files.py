"""Files of learned sums: whole, durable, sealed like the store's blobs where there is a keyring, checked when read."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvcomm.errors import CorruptEntry
from kvcomm.store.blobs import Owner
from kvcomm.store.files import Files, trouble, write_whole
from kvcomm.store.seal import Keyring
from kvcomm.store.statistics import decode_blob, encode_blob

log = logging.getLogger(__name__)


class SnapshotFiles:
    """Files of one folder, each written once under a name of its own. All calls raise StoreUnavailable."""

    def __init__(self, folder: Path, keyring: Keyring | None) -> None:
        self._folder, self._keyring, self._files = folder, keyring, Files()

    def write(self, owner: Owner, data: bytes) -> str:
        """Keep ``data``, durably; the new file's name."""
        name = secrets.token_hex(16) + ".kvs"
        with trouble("keeping learned sums"):
            sealed = encode_blob(owner, name, data, self._keyring)
            write_whole(self._files, self._folder / f"{name}.tmp", self._folder / name, sealed)
        return name

    def open(self, name: str) -> BinaryIO | None:
        """A file to read from, which stays what it is even if it is dropped; None if it is gone."""
        with trouble("reading learned sums"), suppress(FileNotFoundError):
            return open(self._folder / name, "rb")
        return None

    def read(self, owner: Owner, name: str, file: BinaryIO | None) -> bytes | None:
        """What was kept, and close the file; None if it is corrupt or gone, which costs what one node learned."""
        if file is None:
            return None
        try:
            with trouble("reading learned sums"), file:
                return decode_blob(owner, name, file.read(), self._keyring)
        except CorruptEntry as error:
            log.warning("what one node learned is left out: %s", error)
            return None

    def drop(self, name: str | None) -> None:
        """Remove a file; one that cannot be removed is swept at the next start."""
        if name is not None:
            with suppress(OSError):
                self._files.unlink(self._folder / name)

    def sweep(self, kept: Collection[str]) -> None:
        """Remove what a process left over that died between file and row."""
        with trouble("clearing up learned sums"):
            for item in list(self._files.scan(self._folder)):
                if item.name.endswith((".kvs", ".tmp")) and item.name not in kept:
                    self.drop(item.name)
