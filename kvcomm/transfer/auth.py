"""Who may do what: tokens as a client holds them, and the grant that a service makes of one.

A token reads ``kvc_ID_SECRET``. The id is no secret: it names the token in lists, logs and audit lines. The secret is
32 random bytes. A namespace is never asked for: it is the token's.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm.errors import AccessDenied, InvalidInput
from kvcomm.types import Namespace

READ, WRITE, ADMIN = "read", "write", "admin"
RIGHTS = frozenset((READ, WRITE, ADMIN))
TOKEN_VARIABLE = "KVCOMM_TOKEN"
MAX_CREDENTIAL_BYTES = 4096
_TOKEN = re.compile(r"kvc_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True)
class Token:
    """A token taken apart; the secret is in neither ``repr`` nor ``str``.

    Attributes:
        identity: 16 hex digits, public.
        secret: 43 characters of URL-safe base 64.
    """

    identity: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token. Raises AccessDenied, which shows nothing of ``text``, where it is none."""
        found = _TOKEN.fullmatch(text)
        if found is None:
            raise AccessDenied(f"{len(text)} characters are no token; pass one made by `kvcomm anchors token create`")
        return cls(*found.groups())

    def reveal(self) -> str:
        """The whole token, for the one place that sends or stores it."""
        return f"kvc_{self.identity}_{self.secret}"


@dataclass(frozen=True)
class Grant:
    """What a connection may do, decided once by its token.

    Attributes:
        namespace: the only one it sees.
        rights: of ``read``, ``write`` and ``admin``; none contains another.
        token_id: whose grant this is, to ask again whether it still holds; empty on a private Unix socket.
    """

    namespace: str
    rights: frozenset[str]
    token_id: str = ""

    def __post_init__(self) -> None:
        Namespace(self.namespace)
        object.__setattr__(self, "rights", check_rights(self.rights))

    def need(self, right: str) -> None:
        """Raise AccessDenied unless ``right`` was granted."""
        if right not in self.rights:
            raise AccessDenied(
                f"this needs the right {right!r}, the token has {', '.join(sorted(self.rights)) or 'none'}; "
                "use a token with that right"
            )


def check_rights(rights: Iterable[str]) -> frozenset[str]:
    """``rights`` as a set. Raises InvalidInput where there are none or others than read, write and admin."""
    found = frozenset(rights)
    if not found or not found <= RIGHTS:
        raise InvalidInput(f"rights {sorted(found)[:5]} are not one or more of read, write, admin; choose from these")
    return found


def local_grant(namespace: str) -> Grant:
    """All rights in a namespace, for those who can open a 0600 Unix socket or a loopback port without tokens."""
    return Grant(namespace, RIGHTS)


def read_token(file: Path | None = None, environ: Mapping[str, str] = os.environ) -> Token | None:
    """A client's token, from a private file, else from the variable KVCOMM_TOKEN; None where neither is given.

    It is never taken from a command line, which every user of the machine can read.

    Raises:
        InvalidInput: the file cannot be read, or others may read it.
        AccessDenied: what was found is no token.
    """
    if file is not None:
        return Token.parse(read_private(file, "token").decode("ascii", "replace").strip())
    text = environ.get(TOKEN_VARIABLE, "").strip()
    return Token.parse(text) if text else None


def read_private(file: Path, what: str) -> bytes:
    """A small file that only its owner may read.

    Raises:
        InvalidInput: it cannot be read, is no regular file, is open to others, or exceeds 4,096 bytes.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as opened:
            check_private(os.fstat(fd), file, what)
            data = opened.read(MAX_CREDENTIAL_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{what} file {file} cannot be read ({error.strerror}); check path and owner") from None
    if len(data) > MAX_CREDENTIAL_BYTES:
        raise InvalidInput(f"{what} file {file} exceeds {MAX_CREDENTIAL_BYTES} bytes; it holds something else")
    return data


def check_private(status: os.stat_result, file: Path, what: str) -> None:
    """Raise InvalidInput unless ``status`` is that of a regular file which group and others cannot touch."""
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{what} file {file} is no regular file; pass one")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise InvalidInput(f"{what} file {file} has mode {mode:04o}, open to others; run chmod 600 on it")
