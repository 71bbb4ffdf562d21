"""The disk tier's folder: its places, its marker, who has it open, and what is left over from those who died."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.store.files import FOLDER_MODE, Files, lock, write_whole
from kvcomm.store.seal import Keyring

FORMAT = 1
MAX_ASIDE = 16
_PLACES = ("entries", "tmp", "aside", "owners", "blobs")


class Folder:
    """An opened root folder. While it is open, no other process rebuilds the index.

    Raises:
        InvalidInput: it is sealed and no keyring was given, or the other way round, or with another master secret.
        StoreUnavailable: another process rebuilds it past the deadline.
        OSError: the file system failed.
    """

    def __init__(self, root: Path, files: Files, keyring: Keyring | None, deadline: Deadline) -> None:
        self.root, self.files = root, files
        self.token = secrets.token_hex(8)
        self._known: set[Path] = set()
        self._numbers = iter(range(2**62))
        self._lock = threading.Lock()
        self._make_root()
        for place in _PLACES:
            files.make_folder(root / place)
        self._fds = [os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)]
        try:
            self.alone = lock(self._fds[0], exclusive=True)
            while not self.alone and not lock(self._fds[0], exclusive=False):
                if not deadline.left():
                    raise StoreUnavailable(f"another process is rebuilding {root} beyond {deadline.seconds} s; retry")
                time.sleep(0.005)
            self._own()
            self._check_marker(keyring)
            self.sweep()
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Let other processes open the folder, after what had to be done alone."""
        if self.alone:
            lock(self._fds[0], exclusive=False)
            self.alone = False

    def temporary(self) -> Path:
        """A new name for a file that is being written."""
        with self._lock:
            return self.root / "tmp" / f"{self.token}.{next(self._numbers)}"

    def entries(self, namespace: str, fingerprint: str) -> Path:
        """Folder of the entries of a namespace and a fingerprint's digest."""
        return self.root / "entries" / namespace / fingerprint[:16]

    def make(self, path: Path, *, again: bool = False) -> None:
        """Durably create ``path`` and the folders above it, below the root."""
        if path in self._known and not again:
            return
        if path.parent != self.root:
            self.make(path.parent, again=again)
        self.files.make_folder(path)
        self.files.fsync_folder(path.parent)
        self._known.add(path)

    def alive(self, token: str) -> bool:
        """Whether the store of that token is still open."""
        if token == self.token:
            return True
        try:
            fd = os.open(self.root / "owners" / token, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not lock(fd, exclusive=False)
        finally:
            os.close(fd)

    def sweep(self) -> int:
        """Remove temporary files and owners' marks of stores that died; how many."""
        swept = 0
        alive: dict[str, bool] = {}
        for place in ("tmp", "owners"):
            for item in self.files.scan(self.root / place):
                token = item.name.split(".")[0]
                if token not in alive:
                    alive[token] = self.alive(token)
                if not alive[token]:
                    self._remove(Path(item.path))
                    swept += 1
        return swept

    def set_aside(self, path: Path) -> None:
        """Move what should not be there out of the way, at most 16 such things are kept. Raises OSError."""
        held = sorted(self.files.scan(self.root / "aside"), key=lambda item: item.stat(follow_symlinks=False).st_mtime)
        for item in held[: max(0, len(held) - MAX_ASIDE + 1)]:
            self._remove(Path(item.path))
        with suppress(FileNotFoundError):
            self.files.rename(path, self.root / "aside" / f"{path.name[:64]}.{secrets.token_hex(4)}")

    def empty_aside(self) -> int:
        """Remove what was set aside; how many. Raises OSError."""
        held = list(self.files.scan(self.root / "aside"))
        for item in held:
            self._remove(Path(item.path))
        return len(held)

    def remove_tree(self, top: Path) -> None:
        """Durably remove a namespace's folder with all it holds. Raises OSError."""
        for folder in self.files.scan(top):
            for item in self.files.scan(Path(folder.path)):
                self.files.unlink(Path(item.path))
            self.files.fsync_folder(Path(folder.path))
            self._known.discard(Path(folder.path))
            with suppress(OSError):
                os.rmdir(folder.path)
        self._known.discard(top)
        with suppress(OSError):
            os.rmdir(top)
        self.files.fsync_folder(top.parent)

    def close(self) -> None:
        """Unlock everything."""
        with suppress(OSError):
            self.files.unlink(self.root / "owners" / self.token)
        for fd in self._fds:
            self.files.close(fd)
        self._fds = []

    def _make_root(self) -> None:
        new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(new):
            self.files.make_folder(path)
            self.files.fsync_folder(path.parent)
        os.chmod(self.root, FOLDER_MODE)

    def _own(self) -> None:
        hidden = self.root / "tmp" / f"{self.token}.owner"
        fd = self.files.create(hidden)
        self._fds.append(fd)
        lock(fd, exclusive=True)
        self.files.rename(hidden, self.root / "owners" / self.token)

    def _check_marker(self, keyring: Keyring | None) -> None:
        wanted = {"format": FORMAT, "sealed": keyring is not None, "proof": keyring.proof() if keyring else ""}
        path = self.root / "store.json"
        try:
            found = json.loads(path.read_bytes()[:4096])
        except FileNotFoundError:
            write_whole(self.files, self.temporary(), path, json.dumps(wanted).encode())
            return
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InvalidInput(f"{path} is no marker of format {FORMAT}; use another folder or update kvcomm")
        if found != wanted:
            raise InvalidInput(
                f"{self.root} was made with sealed={found.get('sealed')} and another keyring than given now "
                f"(sealed={wanted['sealed']}); open it with the same master secret"
            )

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for item in self.files.scan(path):
                self._remove(Path(item.path))
            path.rmdir()
        else:
            self.files.unlink(path)
