"""The service's tokens: a SQLite file that holds hashes only, so that who reads it can log in nowhere.

A secret has 256 random bits, so one SHA-256 over it is enough: there is nothing to guess. A token is looked up by its
public id and its hash compared in constant time; an unknown id is compared too, with a hash that nothing has.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvcomm.errors import AccessDenied, InvalidInput, StoreUnavailable
from kvcomm.transfer.auth import Grant, Token, check_private, check_rights
from kvcomm.types import Namespace

MAX_TOKENS = 10_000
MAX_NOTE_CHARS = 80
_BUSY_S = 5.0
_NOBODY = bytes(32)
_SCHEMA = """CREATE TABLE IF NOT EXISTS tokens (
  id TEXT PRIMARY KEY, hash BLOB NOT NULL, namespace TEXT NOT NULL, rights TEXT NOT NULL, note TEXT NOT NULL,
  created_s REAL NOT NULL, expires_s REAL, revoked_s REAL) STRICT"""


@dataclass(frozen=True)
class TokenInfo:
    """A token as a list shows it. Times are Unix times in seconds; None for never."""

    identity: str
    namespace: str
    rights: frozenset[str]
    note: str
    created_s: float
    expires_s: float | None
    revoked_s: float | None

    def state(self, now_s: float) -> str:
        """``active``, ``expired`` or ``revoked``."""
        if self.revoked_s is not None:
            return "revoked"
        return "expired" if self.expires_s is not None and now_s >= self.expires_s else "active"


class TokenFile:
    """Tokens in a file of mode 0600. Threads and processes may use one file at once; changes are seen by the next call.

    Args:
        path: the SQLite file.
        create: make it if it is not there; a service passes False, so that a wrong path is no empty list.
        clock: Unix time in seconds.

    Raises:
        InvalidInput: the file is missing, open to others or no list of tokens.
    """

    def __init__(self, path: Path, *, create: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
            fd = os.open(path, flags, 0o600)
            try:
                check_private(os.fstat(fd), path, "token")
            finally:
                os.close(fd)
        except OSError as error:
            raise InvalidInput(
                f"token file {path} cannot be opened ({error.strerror}); make one with `kvcomm anchors token create`"
            ) from None
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_SCHEMA)
        except sqlite3.Error as error:
            self._db.close()
            raise InvalidInput(f"{path} is no token file ({error}); pass another path") from None

    def create(
        self, namespace: Namespace, rights: Iterable[str], *, lifetime_s: float | None = None, note: str = ""
    ) -> Token:
        """Make a token and keep its hash, durably. It is shown this once and cannot be had again.

        Raises:
            InvalidInput: unknown rights, a lifetime that is not positive, a note of more than 80 printable characters,
                or 10,000 tokens held already.
        """
        granted = check_rights(rights)
        if lifetime_s is not None and not 0 < lifetime_s < float("inf"):
            raise InvalidInput(f"a lifetime of {lifetime_s} s is not positive and finite; omit it for no end")
        if len(note) > MAX_NOTE_CHARS or not note.isprintable():
            raise InvalidInput(f"note of {len(note)} characters is not up to {MAX_NOTE_CHARS} printable ones; shorten")
        token = Token(secrets.token_hex(8), secrets.token_urlsafe(32))
        now = self._clock()
        ends = None if lifetime_s is None else now + lifetime_s
        row = (token.identity, _hash(token), namespace.name, " ".join(sorted(granted)), note, now, ends, None)
        with self._database() as db:
            if db.execute("SELECT count(*) FROM tokens").fetchone()[0] >= MAX_TOKENS:
                raise InvalidInput(f"{self.path} holds {MAX_TOKENS} tokens, the limit; purge revoked and expired ones")
            db.execute("INSERT INTO tokens VALUES (?,?,?,?,?,?,?,?)", row)
        return token

    def tokens(self, namespace: Namespace | None = None) -> list[TokenInfo]:
        """All tokens, or a namespace's, oldest first."""
        with self._database() as db:
            rows = db.execute(
                "SELECT id, namespace, rights, note, created_s, expires_s, revoked_s FROM tokens "
                "WHERE ?1 IS NULL OR namespace = ?1 ORDER BY created_s, id", (namespace and namespace.name,)
            ).fetchall()  # fmt: skip
        return [TokenInfo(i, n, frozenset(r.split()), note, *times) for i, n, r, note, *times in rows]

    def revoke(self, identity: str) -> bool:
        """End a token at once; False if it is unknown or was revoked before."""
        with self._database() as db:
            done = db.execute(
                "UPDATE tokens SET revoked_s = ? WHERE id = ? AND revoked_s IS NULL", (self._clock(), identity)
            )
            return done.rowcount == 1

    def purge(self) -> int:
        """Drop revoked and expired tokens from the list; how many."""
        with self._database() as db:
            now = self._clock()
            return db.execute("DELETE FROM tokens WHERE revoked_s IS NOT NULL OR expires_s <= ?", (now,)).rowcount

    def check(self, token: Token) -> Grant:
        """What ``token`` grants.

        Raises:
            AccessDenied: unknown, wrong, expired or revoked. Only who has the right secret is told which.
            StoreUnavailable: the file cannot be read.
        """
        with self._database() as db:
            row = db.execute(
                "SELECT hash, namespace, rights, expires_s, revoked_s FROM tokens WHERE id = ?", (token.identity,)
            ).fetchone()
        kept = row[0] if row is not None else _NOBODY
        if not hmac.compare_digest(_hash(token), kept) or row is None:
            raise AccessDenied("the token is not accepted; ask the operator for one")
        _, namespace, rights, expires_s, revoked_s = row
        if revoked_s is not None or (expires_s is not None and self._clock() >= expires_s):
            raise AccessDenied(
                f"token {token.identity} {'was revoked' if revoked_s is not None else 'has expired'}; get a new one"
            )
        return Grant(namespace, frozenset(rights.split()), token.identity)

    def authenticate(self, sent: bytes) -> Grant:
        """``check`` for a token as it comes over a connection."""
        return self.check(Token.parse(sent.decode("ascii", "replace")))

    def holds(self, grant: Grant) -> bool:
        """Whether a grant made before still holds: for connections that stay open, to be asked every few seconds."""
        with self._database() as db:
            row = db.execute(
                "SELECT namespace, rights FROM tokens WHERE id = ? AND revoked_s IS NULL "
                "AND (expires_s IS NULL OR expires_s > ?)", (grant.token_id, self._clock())
            ).fetchone()  # fmt: skip
        return row is not None and row == (grant.namespace, " ".join(sorted(grant.rights)))

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """The connection, alone, within a transaction that ends durably or not at all."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreUnavailable(
                    f"token file {self.path} failed ({error}); check disk and permissions"
                ) from error


def _hash(token: Token) -> bytes:
    return hashlib.sha256(token.secret.encode("ascii")).digest()
