"""The disk tier's account in SQLite: who holds how much, and who goes first. Made again from the files at any time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcomm.errors import DeadlineExceeded, StoreUnavailable
from kvcomm.store.base import Deadline, Priority
from kvcomm.store.eviction import Candidate, Limits, Policy, Quota, Usage, order, total

VERSION = 1
_SCHEMA = (
    """CREATE TABLE entry(
      name TEXT PRIMARY KEY, namespace TEXT NOT NULL, folder TEXT NOT NULL, grp TEXT NOT NULL,
      priority INTEGER NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, accessed REAL NOT NULL,
      uses INTEGER NOT NULL, expires REAL, owner TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX entry_order ON entry(namespace, priority, accessed)",
    "CREATE INDEX entry_group ON entry(namespace, grp)",
    "CREATE INDEX entry_expires ON entry(expires) WHERE expires IS NOT NULL",
    "CREATE TABLE usage(namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL, entries INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TRIGGER entry_in AFTER INSERT ON entry BEGIN
      INSERT INTO usage VALUES(new.namespace, new.bytes, 1)
      ON CONFLICT(namespace) DO UPDATE SET bytes = bytes + new.bytes, entries = entries + 1;
    END""",
    """CREATE TRIGGER entry_out AFTER DELETE ON entry BEGIN
      UPDATE usage SET bytes = bytes - old.bytes, entries = entries - 1 WHERE namespace = old.namespace;
      DELETE FROM usage WHERE namespace = old.namespace AND entries = 0;
    END""",
)
_COLUMNS = "name, namespace, folder, grp, priority, bytes, created, accessed, uses, expires, owner"
State = Literal["reserved", "held", "pending"]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry's account. ``owner`` is empty once the entry is whole, else the store that writes it."""

    name: str
    namespace: str
    folder: str
    group: str
    priority: int
    nbytes: int
    created_s: float
    accessed_s: float
    uses: int
    expires_s: float | None
    owner: str

    def candidate(self) -> Candidate:
        """As eviction sees it."""
        return Candidate(
            self.name, self.namespace, self.priority, self.nbytes, self.created_s, self.accessed_s, self.uses
        )


Evict = Callable[[Row], bool]


@dataclass(frozen=True)
class Plan:
    """What a reservation needs to make room.

    Attributes:
        evict: removes an entry's file unless it is pinned, and says whether it is gone.
        erase: removes it in any case.
        alive: whether the store of that token is still open.
    """

    limits: Limits
    policy: Policy
    evict: Evict
    erase: Evict
    alive: Callable[[str], bool]


class Index:
    """One connection, used by one thread at a time. Losing its last transactions in a power cut is harmless.

    Raises:
        StoreUnavailable: the file is no index of this version, or is broken.
    """

    def __init__(self, path: Path, deadline: Deadline) -> None:
        self._lock = threading.Lock()
        self._touched: dict[str, tuple[float, int]] = {}
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"index {path.name} does not open: {error}") from error
        try:
            with self._using(deadline):
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                if self._db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                    raise StoreUnavailable(f"index {path.name} is broken")
                with self._transaction():
                    if self._one("PRAGMA user_version") == 0:
                        for statement in _SCHEMA:
                            self._db.execute(statement)
                        self._db.execute(f"PRAGMA user_version = {VERSION}")
                if self._one("PRAGMA user_version") != VERSION:
                    raise StoreUnavailable(f"index {path.name} has another version than {VERSION}")
                self._db.execute(f"SELECT {_COLUMNS} FROM entry LIMIT 1").fetchall()
        except BaseException:
            self._db.close()
            raise

    def reserve(self, row: Row, plan: Plan, deadline: Deadline) -> State:
        """Count ``row`` in as pending, evicting first what must go, so that the limits hold at each moment.

        Returns:
            ``held`` if the entry is there already, ``pending`` if another store is writing it.

        Raises:
            StoreUnavailable: too large, or everything that could go is pinned.
        """
        with self._using(deadline), self._transaction():
            self._write_touched()
            held = self._rows("name = ?", row.name)
            if held and held[0].owner and plan.alive(held[0].owner):
                return "pending"
            if held and not held[0].owner and not _expired(held[0], row.created_s):
                return "held"
            if held:
                self._evict(held[0], plan.erase)
            for old in self._rows("expires <= ? LIMIT 64", row.created_s):
                self._evict(old, plan.evict)
            kept: set[str] = set()
            while payers := plan.limits.pressure(row.namespace, row.nbytes, self._usage()):
                if not self._evict_one(payers, plan, kept, row.created_s):
                    raise StoreUnavailable(
                        f"no room for {row.nbytes} bytes: the {len(kept)} entries that could go are pinned or being "
                        "written; release handles or raise max_bytes"
                    )
            self._insert(row)
            return "reserved"

    def commit(self, name: str, owner: str, deadline: Deadline) -> bool:
        """The entry is whole now. False if its reservation is gone."""
        with self._using(deadline):
            done = self._db.execute("UPDATE entry SET owner = '' WHERE name = ? AND owner = ?", (name, owner))
            return done.rowcount == 1

    def remove(self, name: str, deadline: Deadline, owner: str = "") -> bool:
        """Count an entry (or, with ``owner``, its reservation) out."""
        with self._using(deadline):
            return self._db.execute("DELETE FROM entry WHERE name = ? AND owner = ?", (name, owner)).rowcount == 1

    def remove_where(self, plan: Plan, deadline: Deadline, namespace: str, group: str | None = None) -> int:
        """Erase all of a namespace, or of a group in it, pinned or not; how many there were."""
        with self._using(deadline), self._transaction():
            found = (
                self._rows("namespace = ?", namespace) if group is None
                else self._rows("namespace = ? AND grp = ?", namespace, group)
            )  # fmt: skip
            return sum(self._evict(row, plan.erase) for row in found if not row.owner or not plan.alive(row.owner))

    def find(self, name: str, deadline: Deadline) -> Row | None:
        """The account of one entry."""
        with self._using(deadline):
            found = self._rows("name = ?", name)
            return found[0] if found else None

    def used(self, name: str, now_s: float) -> None:
        """Note a use; written with the next reservation or flush."""
        self._touched[name] = (now_s, self._touched.get(name, (0.0, 0))[1] + 1)

    def renew(self, name: str, expires_s: float, deadline: Deadline) -> bool:
        """Let an entry that has an end live until ``expires_s`` at least. False if it is not there."""
        with self._using(deadline):
            statement = "UPDATE entry SET expires = max(expires, ?) WHERE name = ? AND owner = ''"
            return self._db.execute(statement, (expires_s, name)).rowcount == 1

    def expire(self, evict: Evict, now_s: float, deadline: Deadline) -> int:
        """Evict what outlived its time."""
        with self._using(deadline), self._transaction():
            return sum(self._evict(row, evict) for row in self._rows("expires <= ?", now_s))

    def shrink(self, quota: Quota, plan: Plan, now_s: float, deadline: Deadline) -> int:
        """Evict until all together are within ``quota`` or only pinned entries are left; how many went."""
        with self._using(deadline), self._transaction():
            self._write_touched()
            kept: set[str] = set()
            count = 0
            while (usage := self._usage()) and not quota.holds(total(usage)):
                if not self._evict_one(usage, plan, kept, now_s):
                    break
                count += 1
            return count

    def usage(self, deadline: Deadline) -> dict[str, Usage]:
        """What each namespace holds, reservations included."""
        with self._using(deadline):
            return self._usage()

    def reconcile(
        self, found: Mapping[str, Row], exists: Callable[[Row], bool], alive: Callable[[str], bool], deadline: Deadline
    ) -> int:
        """Make the account agree with the files ``found``; the number of rows that changed."""
        with self._using(deadline), self._transaction():
            changed = 0
            known = self._rows("1")
            for row in known:
                stale = not alive(row.owner) if row.owner else row.name not in found and not exists(row)
                if stale or (row.name in found and not row.owner and row.nbytes != found[row.name].nbytes):
                    changed += self._db.execute("DELETE FROM entry WHERE name = ?", (row.name,)).rowcount
            there = {row.name for row in self._rows("1")}
            for name in found.keys() - there:
                if exists(found[name]):
                    self._insert(found[name])
                    changed += 1
            sums = "SELECT namespace, SUM(bytes), COUNT(*) FROM entry GROUP BY namespace ORDER BY namespace"
            counted = self._db.execute("SELECT namespace, bytes, entries FROM usage ORDER BY namespace").fetchall()
            if counted != self._db.execute(sums).fetchall():
                self._db.execute("DELETE FROM usage")
                self._db.execute(f"INSERT INTO usage {sums}")
            return changed

    def sizes(self, deadline: Deadline) -> dict[str, int]:
        """Name and bytes of every entry that is whole."""
        with self._using(deadline):
            return dict(self._db.execute("SELECT name, bytes FROM entry WHERE owner = ''").fetchall())

    def flush(self, deadline: Deadline) -> None:
        """Write noted uses."""
        with self._using(deadline), self._transaction():
            self._write_touched()

    def close(self) -> None:
        """Close the connection."""
        with self._lock, suppress(sqlite3.Error):
            self._db.close()

    def _evict_one(self, payers: Iterable[str], plan: Plan, kept: set[str], now_s: float) -> bool:
        for depth in (plan.policy.depth + len(kept), 2**31):
            for row in self._oldest(payers, plan.policy, depth, now_s):
                if row.name in kept:
                    continue
                if self._evict(row, plan.evict):
                    return True
                kept.add(row.name)
        return False

    def _oldest(self, payers: Iterable[str], policy: Policy, depth: int, now_s: float) -> Iterator[Row]:
        """Candidates, first to go first; a higher class is looked at only when the lower ones gave nothing."""
        where = "namespace = ? AND priority = ? AND owner = '' ORDER BY accessed LIMIT ?"
        for priority in Priority:
            found = (self._rows(where, namespace, int(priority), depth) for namespace in payers)
            rows = {row.name: row for part in found for row in part}
            yield from (rows[c.name] for c in order((r.candidate() for r in rows.values()), policy, now_s))

    def _evict(self, row: Row, evict: Evict) -> bool:
        if not evict(row):
            return False
        self._db.execute("DELETE FROM entry WHERE name = ?", (row.name,))
        return True

    def _usage(self) -> dict[str, Usage]:
        return {n: Usage(b, e) for n, b, e in self._db.execute("SELECT namespace, bytes, entries FROM usage")}

    def _insert(self, row: Row) -> None:
        self._db.execute(
            f"INSERT INTO entry({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row.name, row.namespace, row.folder, row.group, row.priority, row.nbytes, row.created_s, row.accessed_s,
             row.uses, row.expires_s, row.owner),
        )  # fmt: skip

    def _rows(self, where: str, *values: object) -> list[Row]:
        return [Row(*found) for found in self._db.execute(f"SELECT {_COLUMNS} FROM entry WHERE {where}", values)]

    def _one(self, statement: str) -> object:
        return self._db.execute(statement).fetchone()[0]

    def _write_touched(self) -> None:
        touched, self._touched = self._touched, {}
        values = [(accessed, uses, name) for name, (accessed, uses) in touched.items()]
        self._db.executemany("UPDATE entry SET accessed = ?, uses = uses + ? WHERE name = ?", values)

    @contextmanager
    def _using(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.left()):
            raise deadline.error("waiting for the index")
        try:
            self._db.execute(f"PRAGMA busy_timeout = {max(1, int(deadline.left() * 1000))}")
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise DeadlineExceeded(f"another process held the index beyond {deadline.seconds} s; retry") from error
            raise StoreUnavailable(f"the index failed: {error}; the entries are safe, reopen the store") from error
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the index failed: {error}; the entries are safe, reopen to rebuild it") from error
        finally:
            self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise


def _expired(row: Row, now_s: float) -> bool:
    return row.expires_s is not None and row.expires_s <= now_s
