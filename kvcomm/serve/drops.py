"""Which groups were dropped, in order: pushed to those who watch, and kept for those who were away."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from kvcomm.errors import StoreUnavailable
from kvcomm.store.base import Deadline

KEPT = 1024
Drop = tuple[int, str]  # version, group; the empty group stands for everything


class Drops:
    """A numbered list of drops for each namespace, of which the last 1,024 are kept, in a file or in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._changed = threading.Condition()
        self._closed = False
        try:
            self._database = sqlite3.connect(
                ":memory:" if path is None else path, isolation_level=None, check_same_thread=False, timeout=5.0
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS drops (namespace TEXT, version INTEGER, name TEXT, "
                "PRIMARY KEY (namespace, version)) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the service's state {path} cannot be opened ({error}); check the folder") from None
        if path is not None:
            path.chmod(0o600)

    def add(self, namespace: str, group: str) -> int:
        """Write a drop down and wake those who watch; its version. Raises StoreUnavailable."""
        with self._changed:
            try:
                version = self._last(namespace) + 1
                self._database.execute("INSERT INTO drops VALUES (?, ?, ?)", (namespace, version, group))
                self._database.execute(
                    "DELETE FROM drops WHERE namespace = ? AND version <= ?", (namespace, version - KEPT)
                )
            except sqlite3.Error as error:
                raise StoreUnavailable(f"a drop could not be written down ({error}); try again") from None
            self._changed.notify_all()
            return version

    def since(self, namespace: str, version: int) -> list[Drop]:
        """Drops after ``version``, in order; one of everything where some of them are not kept any more.

        A version that is yet to come is from before this service lost its state: everything counts as dropped.
        """
        with self._changed:
            last = self._last(namespace)
            if version > last or version < last - KEPT:
                return [(last, "")]
            return self._read(namespace, version)

    def wait(self, namespace: str, version: int, deadline: Deadline) -> list[Drop]:
        """As ``since``, after waiting for one at most until the deadline."""
        with self._changed:
            while not self._closed and deadline.left() and self._last(namespace) == version:
                self._changed.wait(deadline.left())
        return self.since(namespace, version)

    def last(self, namespace: str) -> int:
        """Version of the last drop, 0 where there was none."""
        with self._changed:
            return self._last(namespace)

    def close(self) -> None:
        """Let go of the file; those who wait return."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._database.close()
            self._changed.notify_all()

    def _last(self, namespace: str) -> int:
        row = self._query("SELECT max(version) FROM drops WHERE namespace = ?", (namespace,))
        return int(str(row[0][0] or 0))

    def _read(self, namespace: str, version: int) -> list[Drop]:
        found = self._query(
            "SELECT version, name FROM drops WHERE namespace = ? AND version > ? ORDER BY version", (namespace, version)
        )
        return [(int(str(v)), str(name)) for v, name in found]

    def _query(self, sql: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        if self._closed:
            raise StoreUnavailable("the service is stopping; connect again later")
        return self._database.execute(sql, values).fetchall()
