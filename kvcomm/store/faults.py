"""File layers that fail, stop or forget, for tests of anything that keeps entries. Nothing in the package imports this.

``HookedFiles`` calls a hook around every operation; ``FailNth`` and ``KillAt`` are hooks. ``VolatileFiles`` remembers
what was synced, and builds folders as they might look after a loss of power.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm.store.files import FOLDER_MODE, Files

OPERATIONS = (
    "create", "write", "fsync", "rename", "fsync_folder", "make_folder", "open", "readv", "unlink", "scan", "point",
)  # fmt: skip
Hook = Callable[[str, str], None]


class HookedFiles(Files):
    """Real files; ``hook(operation, when)`` runs around each, ``when`` being ``before``, ``half`` or ``after``."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    @contextmanager
    def _around(self, operation: str) -> Iterator[None]:
        self.hook(operation, "before")
        yield
        self.hook(operation, "after")

    def point(self, name: str) -> None:
        self.hook("point", name)

    def create(self, path: Path) -> int:
        with self._around("create"):
            return super().create(path)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> None:
        with self._around("write"):
            data = memoryview(b"".join(buffers))
            super().write(fd, [data[: len(data) // 2]])
            self.hook("write", "half")
            super().write(fd, [data[len(data) // 2 :]])

    def fsync(self, fd: int) -> None:
        with self._around("fsync"):
            super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self._around("rename"):
            super().rename(source, target)

    def fsync_folder(self, path: Path) -> None:
        with self._around("fsync_folder"):
            super().fsync_folder(path)

    def make_folder(self, path: Path) -> None:
        with self._around("make_folder"):
            super().make_folder(path)

    def open(self, path: Path) -> int:
        with self._around("open"):
            return super().open(path)

    def readv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._around("readv"):
            return super().readv(fd, buffers, offset)

    def unlink(self, path: Path) -> None:
        with self._around("unlink"):
            super().unlink(path)

    def scan(self, path: Path) -> Iterator[os.DirEntry[str]]:
        with self._around("scan"):
            found = list(super().scan(path))
        yield from found


@dataclass
class FailNth:
    """Hook: the ``nth`` call (from 1) of ``operation`` raises OSError(``error``); with ``forever`` all later ones too.

    With ``when="after"`` the operation is done and fails nevertheless.
    """

    operation: str
    nth: int
    error: int
    when: str = "before"
    forever: bool = False
    seen: int = field(default=0, init=False)

    @property
    def fired(self) -> bool:
        """Whether it has failed a call."""
        return self.seen >= self.nth

    def __call__(self, operation: str, when: str) -> None:
        if operation == self.operation and (when == self.when or operation == "point"):
            self.seen += 1
            if self.seen == self.nth or (self.forever and self.seen > self.nth):
                raise OSError(self.error, os.strerror(self.error))


@dataclass
class KillAt:
    """Hook: SIGKILL to this process at the ``nth`` moment (from 1): before, within and after each operation."""

    nth: int
    seen: int = field(default=0, init=False)

    def __call__(self, operation: str, when: str) -> None:
        self.seen += 1
        if self.seen == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Event:
    kind: str
    node: int
    path: str = ""
    other: str = ""
    data: bytes = b""


class VolatileFiles(Files):
    """Real files below ``root`` and a journal of what was done to them, for ``crash``.

    The model: written bytes are sure after fsync of the file, names after fsync of the folder that they are in.
    Until then each name change may or may not have happened, in any order; unsynced bytes may be there, missing, cut
    or zero.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.events: list[_Event] = []
        self._nodes: dict[int, int] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._nodes[fd] = len(self.events)
        self._note("create", self._nodes[fd], path)
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview]) -> None:
        super().write(fd, buffers)
        self.events.append(_Event("write", self._nodes[fd], data=b"".join(buffers)))

    def fsync(self, fd: int) -> None:
        self.events.append(_Event("fsync", self._nodes[fd]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", -1, source, target)

    def fsync_folder(self, path: Path) -> None:
        if path.is_relative_to(self._root):
            self._note("sync", -1, path)

    def make_folder(self, path: Path) -> None:
        there = path.exists()
        super().make_folder(path)
        if not there and path.is_relative_to(self._root) and path != self._root:
            self._note("mkdir", -1, path)

    def unlink(self, path: Path) -> None:
        if os.path.lexists(path):
            super().unlink(path)
            self._note("unlink", -1, path)

    def crash(self, at: int, chance: random.Random, target: Path) -> None:
        """Build in ``target`` a folder as it might be found had power failed after the first ``at`` events."""
        past = self.events[:at]
        last_sync: dict[str, int] = {}
        written: dict[int, bytearray] = {}
        sure: dict[int, int] = {}
        for number, event in enumerate(past):
            if event.kind == "sync":
                last_sync[event.path] = number
            elif event.kind == "write":
                written.setdefault(event.node, bytearray()).extend(event.data)
            elif event.kind == "fsync":
                sure[event.node] = len(written.get(event.node, b""))
        names: dict[str, int] = {}
        folders: set[str] = {""}
        node_of: dict[str, int] = {}
        for number, event in enumerate(past):
            node = node_of.get(event.path, event.node)
            place = event.other if event.kind == "rename" else event.path
            happened = last_sync.get(str(Path(place).parent).removeprefix("."), -1) > number or chance.random() < 0.5
            if event.kind == "create":
                node_of[event.path] = event.node
                if happened:
                    names[event.path] = event.node
            elif event.kind == "rename":
                node_of[event.other] = node_of.pop(event.path, -1)
                if happened:
                    names.pop(event.path, None)
                    names[event.other] = node
            elif event.kind == "unlink" and happened:
                names.pop(event.path, None)
            elif event.kind == "mkdir" and happened:
                folders.add(event.path)
        target.mkdir(mode=FOLDER_MODE)
        for folder in sorted(folders):
            if str(Path(folder).parent).removeprefix(".") in folders:
                (target / folder).mkdir(mode=FOLDER_MODE, exist_ok=True)
        for path, node in names.items():
            if node >= 0 and (target / path).parent.is_dir():
                data = _survive(bytes(written.get(node, b"")), sure.get(node, 0), chance)
                (target / path).write_bytes(data)

    def _note(self, kind: str, node: int, path: Path, other: Path | None = None) -> None:
        def local(p: Path) -> str:
            return str(p.relative_to(self._root)).removeprefix(".")

        self.events.append(_Event(kind, node, local(path), local(other) if other is not None else ""))


def _survive(data: bytes, sure: int, chance: random.Random) -> bytes:
    """What may be found of ``data`` whose first ``sure`` bytes were synced."""
    rest = data[sure:]
    fate = chance.randrange(4)
    if fate == 0:
        rest = b""
    elif fate == 1:
        rest = rest[: chance.randrange(len(rest) + 1)]
    elif fate == 2:
        start = chance.randrange(len(rest) + 1)
        rest = rest[:start] + bytes(len(rest) - start)
    return data[:sure] + rest
