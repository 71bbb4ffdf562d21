"""A small piece of work with a disk store, and what must hold of the store afterwards, however the work ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcomm.errors import StoreError
from kvcomm.store import DiskStore, Store
from kvcomm.store.files import Files
from kvcomm.store.testing import ONE, fingerprint, holds, sample

OWNER = (ONE, fingerprint())
Note = Callable[[str], None]


def steps(store: Store) -> list[tuple[str, Callable[[], object]]]:
    """Named calls; ``put n`` and ``cut n`` name the entry, ``blob n`` the content."""

    def put(number: int) -> tuple[str, Callable[[], object]]:
        return f"put {number}", lambda: store.put(*sample(number))

    def blob(number: int) -> tuple[str, Callable[[], object]]:
        return f"blob {number}", lambda: store.blobs.write(OWNER, "offsets", b"%d" % number * 100)

    def cut(number: int) -> tuple[str, Callable[[], object]]:
        return f"cut {number}", lambda: store.delete(sample(number)[0])

    return [put(0), put(1), blob(1), cut(0), put(2), blob(2), put(0), cut(1)]


def work(folder: Path, files: Files, begin: Note, done: Note) -> list[StoreError]:
    """Do all steps, going on after typed errors, which are returned; tells when each begins and is acknowledged."""
    errors: list[StoreError] = []
    store: DiskStore | None = None
    for _ in range(4):
        try:
            store = DiskStore(folder, files=files)
            break
        except StoreError as error:
            errors.append(error)
    if store is None:
        return errors
    for name, call in steps(store):
        begin(name)
        try:
            call()
        except StoreError as error:
            errors.append(error)
        else:
            done(name)
    for number in range(3):
        try:
            holds(store, number)
        except StoreError as error:
            errors.append(error)
    store.close()
    return errors


class Ledger:
    """What was begun and what was acknowledged, hence what may be found."""

    def __init__(self) -> None:
        self.entries: dict[int, set[bool]] = {n: {False} for n in range(3)}
        self.blobs: set[int] = {0}

    def begin(self, name: str) -> None:
        kind, number = name.split()
        if kind == "blob":
            self.blobs.add(int(number))
        else:
            self.entries[int(number)].add(kind == "put")

    def done(self, name: str) -> None:
        kind, number = name.split()
        if kind == "blob":
            self.blobs = {int(number)}
        else:
            self.entries[int(number)] = {kind == "put"}

    def check(self, folder: Path) -> None:
        """Reopen: acknowledged is there bit by bit, the rest absent or whole, nothing left over, and a put works."""
        with DiskStore(folder) as store:
            for number, allowed in self.entries.items():
                assert holds(store, number) in allowed, (number, allowed)
            found = store.blobs.read(OWNER, "offsets")
            assert found in [b"%d" % n * 100 if n else None for n in self.blobs]
            assert store.stats().counters.get("corrupt", 0) == 0
            assert list((folder / "tmp").iterdir()) == []
            assert len(list((folder / "owners").iterdir())) == 1
            assert store.stats().entries == store.upkeep.count()
            store.put(*sample(50))
            assert holds(store, 50)
