"""What all nodes learned of offsets: each node's last snapshot is kept, and their sum is given out.

State is a map from node to the snapshot with the highest (epoch, sequence); joining two such maps takes the higher one
for each node. That is commutative, associative and idempotent, so order, repeats and losses do not matter. The sum is
taken when it is asked for, in the order of nodes' names, without the asker's own: equal states give equal bytes.

A snapshot is a file of its own, sealed like the store's blobs where there is a keyring; SQLite says which one counts.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcomm.anchors.saved import Learned, dump, restore
from kvcomm.errors import InvalidInput, StoreUnavailable, Superseded
from kvcomm.serve.snapshot import ordered, read_snapshot, snapshot_bounds
from kvcomm.serve.snapshot_files import SnapshotFiles
from kvcomm.store.blobs import Owner
from kvcomm.store.files import FILE_MODE, FOLDER_MODE, trouble
from kvcomm.store.seal import Keyring
from kvcomm.store.sums import Opened, Others
from kvcomm.types import ModelFingerprint, Namespace, digest_fields

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
  namespace TEXT NOT NULL, fingerprint TEXT NOT NULL, template TEXT NOT NULL, node TEXT NOT NULL,
  opened INTEGER NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL, file TEXT, bytes INTEGER NOT NULL,
  PRIMARY KEY (namespace, fingerprint, template, node)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS epochs (namespace TEXT PRIMARY KEY, last INTEGER NOT NULL) STRICT;
"""
_SUBJECT = "namespace = ? AND fingerprint = ? AND template = ?"


@dataclass(frozen=True)
class Subject:
    """Whose sums: nothing is ever added across two of these.

    Attributes:
        namespace: the token's.
        template: name of what the labels in it belong to, 1 to 128 of ``[A-Za-z0-9._/:-]``.
    """

    namespace: Namespace
    fingerprint: ModelFingerprint
    template: str = "all"

    def __post_init__(self) -> None:
        check_node(self.template)
        snapshot_bounds(self.fingerprint)

    @property
    def owner(self) -> Owner:
        """Whose keys seal its files."""
        return self.namespace, self.fingerprint

    @property
    def row(self) -> tuple[str, str, str]:
        """As the table has it."""
        return self.namespace.name, self.fingerprint.digest, self.template


@dataclass(frozen=True)
class Limits:
    """What a namespace may keep here. Bytes are those of snapshots, which a model of 135 million parameters makes 25 to
    200 MB of: layers * heads * (2 * head_dim)² * 16, and 8 * layers * heads * 4 * head_dim per pair and bucket."""

    nodes: int = 256
    snapshot_bytes: int = 1 << 30
    namespace_bytes: int = 16 << 30


class LearnedSums:
    """The service's side of kvcomm.anchors.shared_sums. Threads may use one object at once; one process a folder.

    Raises:
        StoreUnavailable: from every call, where folder or database fail. What was acknowledged stays.
    """

    def __init__(self, folder: Path, keyring: Keyring | None = None, limits: Limits = Limits()) -> None:
        self._folder, self.limits = folder, limits
        self._files = SnapshotFiles(folder, keyring)
        self._lock = threading.RLock()
        with trouble(f"opening {folder}"):
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            (folder / "learned.sqlite").touch(mode=FILE_MODE)
        try:
            self._db = sqlite3.connect(folder / "learned.sqlite", isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            kept = {name for (name,) in self._db.execute("SELECT file FROM nodes WHERE file IS NOT NULL")}
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{folder}/learned.sqlite cannot be used ({error}); move it away") from error
        self._files.sweep(kept)

    def open(self, subject: Subject, node: str) -> Opened:
        """Begin a new epoch of ``node``, above all that were ever given; an older process of its name is shut out.

        Raises:
            InvalidInput: no name of a node, or one node more than the namespace may have.
        """
        check_node(node)
        with self._transaction() as db:
            row = self._row(subject, node)
            if row is None:
                held = db.execute("SELECT count(*) FROM nodes WHERE namespace = ?", subject.row[:1]).fetchone()[0]
                if held >= self.limits.nodes:
                    raise InvalidInput(
                        f"namespace {subject.namespace} has {held} nodes, the limit; give a restarted node its old "
                        "name, or retire one"
                    )
            epoch = self._next_epoch(subject.namespace.name)
            db.execute(
                "INSERT INTO nodes VALUES (?,?,?,?,?,0,0,NULL,0) ON CONFLICT DO UPDATE SET opened = excluded.opened",
                (*subject.row, node, epoch),
            )
            data = None if row is None or row.file is None else self._read(subject, row.file)
            return Opened(epoch, (0, 0) if row is None or data is None else (row.epoch, row.sequence), data)

    def put(self, subject: Subject, node: str, epoch: int, sequence: int, data: bytes) -> bool:
        """Keep a node's snapshot, durably; False where one as high is kept already.

        Raises:
            Superseded: ``epoch`` is not the one that ``open`` gave the node last.
            InvalidInput: size outside the schema's or a limit; a sequence outside 1 to 2**53.
            CorruptEntry: sums that no calls give (kvcomm.serve.snapshot). Nothing was changed, as with all of these.
        """
        if not (isinstance(sequence, int) and 1 <= sequence <= 2**53):
            raise InvalidInput(f"sequence {str(sequence)[:40]} is not a whole number of 1 to 2**53; count from 1")
        self._current(subject, node, epoch)
        learned = read_snapshot(data, subject.fingerprint, self.limits.snapshot_bytes)
        name, nbytes = self._write(subject, learned)
        drop: str | None = name
        try:
            with self._transaction() as db:
                row = self._current(subject, node, epoch)
                if (row.epoch, row.sequence) >= (epoch, sequence):
                    return False
                used = db.execute("SELECT sum(bytes) FROM nodes WHERE namespace = ?", subject.row[:1]).fetchone()[0]
                if used - row.nbytes + nbytes > self.limits.namespace_bytes:
                    raise InvalidInput(
                        f"learned sums of namespace {subject.namespace} would exceed {self.limits.namespace_bytes} "
                        "bytes; retire a node, or raise the limit"
                    )
                self._keep(subject, node, (epoch, sequence), name, nbytes)
            drop = row.file
        finally:
            self._files.drop(drop)
        return True

    def others(self, subject: Subject, node: str, epoch: int, known: str = "") -> Others:
        """The sum over all nodes but ``node``, or that it is still ``known``. A snapshot that is corrupt counts not.

        Args:
            node: the asker; empty for one that learns nothing, whose epoch is not looked at.

        Raises:
            Superseded: ``epoch`` is not the one that ``open`` gave the node last.
        """
        with self._lock, self._sql():
            if node:
                self._current(subject, node, epoch)
            rows = self._db.execute(
                f"SELECT node, opened, epoch, sequence, file FROM nodes WHERE {_SUBJECT} AND node != ? "
                "AND file IS NOT NULL ORDER BY node", (*subject.row, node)
            ).fetchall()  # fmt: skip
            version = digest_fields(b"others", *(str(value).encode() for *mark, _ in rows for value in mark))
            if version == known:
                return Others(version, None)
            opened = [(name, self._files.open(name)) for *_, name in rows]
        total = Learned.empty(subject.fingerprint)
        with ExitStack() as stack:  # added up without the lock: an open file stays what it was
            for _, file in opened:
                if file is not None:
                    stack.enter_context(file)
            for name, file in opened:
                data = self._files.read(subject.owner, name, file)
                if data is not None:
                    total.merge(restore(data, subject.fingerprint))
        return Others(version, dump(ordered(total)))

    def nodes(self, subject: Subject) -> tuple[str, ...]:
        """Names of the nodes that were opened."""
        with self._lock, self._sql():
            return tuple(n for (n,) in self._db.execute(f"SELECT node FROM nodes WHERE {_SUBJECT}", subject.row))

    def usage(self, namespace: Namespace) -> int:
        """Bytes that a namespace's snapshots take."""
        with self._lock, self._sql():
            row = self._db.execute("SELECT sum(bytes) FROM nodes WHERE namespace = ?", (namespace.name,)).fetchone()
            return int(row[0] or 0)

    def forget(self, subject: Subject, which: Callable[[str], bool]) -> int:
        """Drop the pairs with a label that ``which`` chooses from all nodes' snapshots; how many snapshots had one.

        Every node begins a new epoch and goes on from what is kept, so nobody brings them back.
        """
        changed, gone = 0, []
        with self._transaction() as db:
            rows = db.execute(f"SELECT node FROM nodes WHERE {_SUBJECT}", subject.row).fetchall()
            for (node,) in rows:
                row = self._row(subject, node)
                data = None if row is None or row.file is None else self._read(subject, row.file)
                db.execute(f"UPDATE nodes SET opened = ? WHERE {_SUBJECT} AND node = ?",
                           (self._next_epoch(subject.namespace.name), *subject.row, node))  # fmt: skip
                learned = None if data is None else restore(data, subject.fingerprint)
                if row is not None and learned is not None and learned.forget(which):
                    self._keep(subject, node, (row.epoch, row.sequence), *self._write(subject, learned))
                    gone.append(row.file)
                    changed += 1
        for file in gone:
            self._files.drop(file)
        return changed

    def retire(self, subject: Subject, node: str) -> bool:
        """Forget a node and what it learned; False if it is unknown."""
        return bool(self._delete(f"{_SUBJECT} AND node = ?", (*subject.row, node)))

    def delete_namespace(self, namespace: Namespace) -> int:
        """Forget all nodes of a namespace; how many there were. Those that live on begin again with nothing."""
        return self._delete("namespace = ?", (namespace.name,))

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            self._db.close()

    def _delete(self, where: str, values: tuple[str, ...]) -> int:
        with self._transaction() as db:
            files = db.execute(f"SELECT file FROM nodes WHERE {where}", values).fetchall()
            db.execute(f"DELETE FROM nodes WHERE {where}", values)
        for (file,) in files:
            self._files.drop(file)
        return len(files)

    def _current(self, subject: Subject, node: str, epoch: int) -> _Row:
        with self._lock, self._sql():
            row = self._row(subject, node)
        if row is None or row.opened != epoch:
            raise Superseded(f"epoch {str(epoch)[:20]} of node {node[:128]!r} is not its present one; open it again")
        return row

    def _row(self, subject: Subject, node: str) -> _Row | None:
        found = self._db.execute(
            f"SELECT opened, epoch, sequence, file, bytes FROM nodes WHERE {_SUBJECT} AND node = ?",
            (*subject.row, node),
        ).fetchone()
        return None if found is None else _Row(*found)

    def _next_epoch(self, namespace: str) -> int:
        """One more than ever given in this namespace; the count outlives the namespace's nodes."""
        return int(
            self._db.execute(
                "INSERT INTO epochs VALUES (?, 1) ON CONFLICT DO UPDATE SET last = last + 1 RETURNING last",
                (namespace,),
            ).fetchone()[0]
        )

    def _write(self, subject: Subject, learned: Learned) -> tuple[str, int]:
        """A new file of a snapshot, which no row names yet; its name and the snapshot's bytes."""
        data = dump(ordered(learned))
        return self._files.write(subject.owner, data), len(data)

    def _keep(self, subject: Subject, node: str, mark: tuple[int, int], name: str, nbytes: int) -> None:
        self._db.execute(
            f"UPDATE nodes SET epoch = ?, sequence = ?, file = ?, bytes = ? WHERE {_SUBJECT} AND node = ?",
            (*mark, name, nbytes, *subject.row, node),
        )

    def _read(self, subject: Subject, name: str) -> bytes | None:
        return self._files.read(subject.owner, name, self._files.open(name))

    @contextmanager
    def _sql(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._folder}/learned.sqlite failed ({error}); check the disk") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._sql():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


@dataclass(frozen=True)
class _Row:
    opened: int
    epoch: int
    sequence: int
    file: str | None
    nbytes: int


def check_node(name: str) -> str:
    """``name`` itself, if it may name a node or a template."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidInput(f"name {str(name)[:80]!r} is not 1 to 128 of [A-Za-z0-9._/:-]; choose such a name")
    return name
