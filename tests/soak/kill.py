"""Writers and readers on one folder, killed at random: no wrong byte, no acknowledged entry lost.

python -m tests.soak.kill --kills 200 --out results/soak-store.json
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvcomm.store import DiskStore, Keyring
from kvcomm.store.testing import holds, sample
from tests.soak.record import record

KEYS = 20_000


def writer(folder: Path, seed: int, pipe: int, keyring: Keyring | None) -> None:
    """Put forever; each acknowledged number goes into the pipe, which outlives this process."""
    chance = random.Random(seed)
    with DiskStore(folder, keyring=keyring) as store:
        while True:
            number = chance.randrange(KEYS)
            store.put(*sample(number, tokens=1 + number % 9))
            os.write(pipe, b"%d\n" % number)


def reader(folder: Path, seed: int, pipe: int, keyring: Keyring | None) -> None:
    """Get and compare forever; ``holds`` raises on a wrong byte."""
    chance = random.Random(seed)
    with DiskStore(folder, keyring=keyring) as store:
        while True:
            number = chance.randrange(KEYS)
            if holds(store, number, tokens=1 + number % 9):
                os.write(pipe, b"r\n")


Role = Callable[[Path, int, int, Keyring | None], None]


def start(role: Role, folder: Path, seed: int, keyring: Keyring | None) -> tuple[int, int]:
    """(process, end of its pipe)."""
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            role(folder, seed, put, keyring)
        except BaseException as error:
            os.write(2, f"{role.__name__}: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(put)
    os.set_blocking(get, False)
    return pid, get


def drain(pipe: int) -> list[str]:
    """What a process has said so far."""
    parts = []
    try:
        while part := os.read(pipe, 1 << 16):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts).decode().split()


def run(folder: Path, kills: int, workers: int = 4, keyring: Keyring | None = None) -> dict[str, object]:
    """Kill ``kills`` times, then check everything. Raises RuntimeError if a promise is broken."""
    chance = random.Random(1)
    running = [(role, *start(role, folder, n, keyring)) for n in range(workers) for role in (writer, reader)]
    said: list[str] = []
    began = time.monotonic()
    for number in range(kills):
        time.sleep(chance.uniform(0.02, 0.2))
        place = chance.randrange(len(running))
        role, pid, pipe = running[place]
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            raise RuntimeError(f"{role.__name__} had ended by itself before kill {number}; see its message above")
        said += drain(pipe)
        os.close(pipe)
        running[place] = (role, *start(role, folder, 1000 + number, keyring))
    for role, pid, pipe in running:
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] != signal.SIGKILL:
            raise RuntimeError(f"{role.__name__} ended by itself; see its message above")
        said += drain(pipe)
        os.close(pipe)
    acknowledged = {int(word) for word in said if word != "r"}
    with DiskStore(folder, keyring=keyring) as store:
        lost = [n for n in acknowledged if not holds(store, n, tokens=1 + n % 9)]
        held = sum(holds(store, n, tokens=1 + n % 9) for n in range(KEYS))
        corrupt = store.stats().counters.get("corrupt", 0)
        left_over = len(list((folder / "tmp").iterdir()))
    if lost or corrupt or left_over:
        raise RuntimeError(f"lost {lost}, corrupt {corrupt}, left over {left_over}")
    return {
        "kills": kills + len(running), "processes": len(running), "acknowledged": len(acknowledged), "held": held,
        "puts": len(said) - said.count("r"), "reads_compared": said.count("r"), "lost": len(lost),
        "wrong_bytes": 0, "corrupt": corrupt, "left_over_files": left_over, "sealed": keyring is not None,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results/soak-store.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder) / "plain", chosen.kills)
    record(chosen.out, "kill", f"python -m tests.soak.kill --kills {chosen.kills}", found)


if __name__ == "__main__":
    main()
