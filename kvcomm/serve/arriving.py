"""An entry that is checked while it arrives, so that little is left to check when its last byte is here."""

from __future__ import annotations

import threading

from kvcomm.errors import KVCommError
from kvcomm.store.base import Entry
from kvcomm.store.codec import BytesSource, EntryReader, entry_view
from kvcomm.store.format import Head


class Arriving:
    """The layers of an entry, each checked once it is whole. Thread-safe.

    Args:
        data: where the entry arrives; what was checked of it must not change any more.
    """

    def __init__(self, data: memoryview, namespace: str) -> None:
        self._data, self._namespace = data, namespace
        self._reader: EntryReader | None = None
        self._checked = 0
        self._failed = False
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Check what is whole within the first ``nbytes`` bytes; what is wrong is told by ``finish``."""
        with self._lock:
            if self._failed:
                return
            try:
                if self._reader is None:
                    self._reader = EntryReader(BytesSource(self._data), self._namespace)
                lead, size = self._reader.lead_bytes, self._reader.layer_bytes
                layers = self._reader.head.key.fingerprint.n_layers
                while self._checked < layers and lead + (self._checked + 1) * size <= nbytes:
                    self._reader.check_frame(self._checked + 1, self._data)
                    self._checked += 1
            except (KVCommError, ValueError):  # ValueError: the upload ended, and its memory with it
                self._failed = True

    def finish(self) -> tuple[Head, Entry]:
        """The entry, every byte checked; see ``entry_view``. Raises CorruptEntry."""
        with self._lock:
            return entry_view(self._data, self._namespace, self._checked)
