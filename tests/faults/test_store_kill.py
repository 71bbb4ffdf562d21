"""SIGKILL at every moment of a piece of work: before, within and after each file operation and index step."""

import os
from pathlib import Path

from kvcomm.store.faults import HookedFiles, KillAt
from tests.faults.work import Ledger, work


def child(folder: Path, nth: int, pipe: int) -> None:
    hook = KillAt(nth)
    work(folder, HookedFiles(hook), lambda n: tell(pipe, f"begin {n}"), lambda n: tell(pipe, f"done {n}"))
    tell(pipe, f"moments {hook.seen}")


def tell(pipe: int, text: str) -> None:
    os.write(pipe, text.encode() + b"\n")


def test_killed_at_every_moment(tmp_path: Path) -> None:
    nth, moments, killed = 1, None, 0
    while moments is None:
        folder = tmp_path / str(nth)
        get, put = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(folder, nth, put)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(put)
        with os.fdopen(get) as pipe:
            lines = pipe.read().split("\n")
        status = os.waitpid(pid, 0)[1]
        ledger = Ledger()
        for line in filter(None, lines):
            kind, rest = line.split(" ", 1)
            if kind == "moments":
                moments = int(rest)
            else:
                getattr(ledger, kind)(rest)
        assert status == (0 if moments is not None else 9)
        killed += status == 9
        ledger.check(folder)
        nth += 1
    assert killed == moments
    assert killed > 150
