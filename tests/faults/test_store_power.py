"""Loss of power: 500 states that a file system may show, with SQLite's file absent, stale, cut or as it was."""

import random
import shutil
from pathlib import Path

from kvcomm.store.faults import VolatileFiles
from tests.faults.work import Ledger, work

STATES = 500


def test_power_lost_at_any_moment(tmp_path: Path) -> None:
    live = tmp_path / "live"
    files = VolatileFiles(live)
    story: list[tuple[int, str, str]] = []
    stale: list[Path] = []

    def note(kind: str, name: str) -> None:
        story.append((len(files.events), kind, name))
        if kind == "begin":
            copy = tmp_path / f"stale{len(stale)}"
            copy.mkdir()
            stale.append(copy)
            for path in live.glob("index.sqlite*"):
                shutil.copy(path, copy)

    assert work(live, files, lambda n: note("begin", n), lambda n: note("done", n)) == []
    shutil.copytree(live, tmp_path / "last", ignore=lambda _, names: [n for n in names if "sqlite" not in n])
    stale.append(tmp_path / "last")
    chance = random.Random(7)
    for number in range(STATES):
        at = chance.randrange(len(files.events) + 1)
        folder = tmp_path / f"state{number}"
        files.crash(at, chance, folder)
        index_fate(folder, stale, chance)
        ledger = Ledger()
        for when, kind, name in story:
            if when < at or (when == at and kind == "done"):
                getattr(ledger, kind)(name)
        check_power_state(ledger, folder)
        shutil.rmtree(folder)


def check_power_state(ledger: Ledger, folder: Path) -> None:
    """As after a kill, but bytes that were never acknowledged may be found torn: they are set aside, never served."""
    from kvcomm.errors import CorruptEntry
    from kvcomm.store import DiskStore
    from kvcomm.store.testing import holds, sample
    from tests.faults.work import OWNER

    with DiskStore(folder) as store:
        for number, allowed in ledger.entries.items():
            assert holds(store, number) in allowed, (number, allowed)
        try:
            found = store.blobs.read(OWNER, "offsets")
        except CorruptEntry:
            found = None
            assert 0 in ledger.blobs
        assert found in [b"%d" % n * 100 if n else None for n in ledger.blobs]
        assert list((folder / "tmp").iterdir()) == []
        assert store.stats().entries == store.upkeep.count()
        store.put(*sample(50))
        assert holds(store, 50)


def index_fate(folder: Path, stale: list[Path], chance: random.Random) -> None:
    fate = chance.randrange(4)
    if fate == 0:
        return
    for path in chance.choice(stale).glob("index.sqlite*"):
        shutil.copy(path, folder)
        if fate == 1:
            copy = folder / path.name
            data = copy.read_bytes()
            copy.write_bytes(data[: chance.randrange(len(data) + 1)])
