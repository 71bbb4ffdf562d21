"""How fast are the tiers, against the plain operation under each? Medians of alternating rounds in one process.

``python -m benchmarks.store --folder FOLDER --out results/bench-store.json``
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import Attributes, DiskStore, Entry, Keyring, MemoryStore, Store, empty_kv
from kvcomm.store.codec import EntryWriter
from kvcomm.store.testing import ONE, fingerprint, sample
from kvcomm.types import Segment, SegmentKV

MODEL = fingerprint(16, 4, 64)
TOKENS = 512
SIZE = MODEL.bytes_per_token * TOKENS


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(rounds: int, **calls: Callable[[int], object]) -> dict[str, float]:
    """Median MiB/s of each call at 16 MiB; another call begins each round, the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 1):
        os.sync()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = seconds(lambda name=name, number=number: calls[name](number))  # type: ignore[misc]
            if number:
                times[name].append(took)
    return {name: round(SIZE / 2**20 / statistics.median(t), 1) for name, t in times.items()}


def plain_write(folder: Path, number: int, data: memoryview) -> None:
    """Write, fsync, rename, and nothing else."""
    fd = os.open(folder / f"{number}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    os.fsync(fd)
    os.close(fd)
    os.rename(folder / f"{number}.tmp", folder / f"{number}.bin")


def plain_read(path: Path, room: memoryview) -> None:
    """Fill ``room``, whose pages were touched before, from the file: the least that a read can cost."""
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < len(room):
            done += file.readinto(room[done:]) or 0


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def direct_read(path: Path, room: memoryview) -> None:
    """Fill ``room``, which is page-aligned, past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    done = 0
    while done < SIZE:
        done += os.preadv(fd, [room[done:]], done)
    os.close(fd)


def speed(folder: Path, rounds: int) -> dict[str, object]:
    """Throughputs at 16 MiB and the three ratios that must hold."""
    import mmap

    entries = [sample(n, tokens=TOKENS, model=MODEL) for n in range(rounds + 1)]
    out = empty_kv(MODEL, TOKENS)
    source = torch.cat([entries[0][1].kv.keys.reshape(-1), entries[0][1].kv.values.reshape(-1)])
    target = torch.empty_like(source)
    raw = memoryview(source.view(torch.uint8).numpy())
    room = memoryview(target.view(torch.uint8).numpy())
    aligned = memoryview(mmap.mmap(-1, SIZE))
    aligned[:] = raw
    out.keys.zero_()
    out.values.zero_()
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvcomm-bench-"))
    stores: dict[str, Store] = {
        "arena": MemoryStore((rounds + 2) * SIZE), "disk": DiskStore(folder / "disk"),
        "sealed": DiskStore(folder / "sealed", keyring=Keyring(secrets.token_bytes(32))),
        "shm": DiskStore(shm / "store", durable=False),
    }  # fmt: skip
    (folder / "plain").mkdir(mode=0o700)
    puts = alternate(
        rounds,
        plain=lambda n: plain_write(folder / "plain", n, raw),
        **{name: (lambda n, s=store: s.put(*entries[n])) for name, store in stores.items()},
    )
    # Once more in pairs. The plain write has two speeds here, about 350 and 2,000 MiB/s, by the file system's mood: the
    # ratio is taken against the better of its two medians.
    more = [sample(rounds + 1 + n, tokens=TOKENS, model=MODEL) for n in range(rounds + 1)]
    durable = alternate(
        rounds,
        plain=lambda n: plain_write(folder / "plain", rounds + 1 + n, raw),
        disk=lambda n: stores["disk"].put(*more[n]),
    )
    key = entries[0][0]
    reads = alternate(
        rounds,
        memcpy=lambda n: target.copy_(source),
        plain=lambda n: plain_read(folder / "plain" / "0.bin", room),
        plain_fresh=lambda n: (folder / "plain" / "0.bin").read_bytes(),
        **{name: (lambda n, s=store: s.get_into(key, out)) for name, store in stores.items()},
    )
    disk = stores["disk"]
    paths = {n: next((folder / "disk" / "entries").rglob(entries[n][0].digest)) for n in range(rounds + 1)}

    def cold(call: Callable[[int], object], path_of: Callable[[int], Path]) -> Callable[[int], float]:
        def run(number: int) -> float:
            forget(path_of(number))
            return seconds(lambda: call(number))

        return run

    def plain(number: int) -> Path:
        return folder / "plain" / f"{number}.bin"

    ways = {
        "plain": cold(lambda n: plain_read(plain(n), room), plain),
        "o_direct": cold(lambda n: direct_read(plain(rounds - n), aligned), lambda n: plain(rounds - n)),
        "disk": cold(lambda n: disk.get_into(entries[n][0], out), lambda n: paths[n]),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name in [*ways][number % 3 :] + [*ways][: number % 3]:
            times[name].append(ways[name](number))
    cold_reads = {name: round(SIZE / 2**20 / statistics.median(t), 1) for name, t in times.items()}
    for store in stores.values():
        store.close()
    shutil.rmtree(shm)
    return {
        "put_mib_s": puts, "get_into_warm_mib_s": reads, "get_into_cold_mib_s": cold_reads,
        "arena_get_over_memcpy": round(reads["arena"] / reads["memcpy"], 3),
        "durable_put_mib_s": durable,
        "durable_put_over_plain": round(durable["disk"] / max(durable["plain"], puts["plain"]), 3),
        "warm_read_over_plain": round(reads["disk"] / reads["plain"], 3),
        "warm_read_over_plain_fresh": round(reads["disk"] / reads["plain_fresh"], 3),
    }  # fmt: skip


def look_up(folder: Path, count: int) -> dict[str, float]:
    """Median and p95 time of a get and release among ``count`` keys, microseconds; half of the gets are misses.

    The files are written beside the store, so that opening it makes the index of all of them from the files.
    """
    small = fingerprint(1, 1, 4)
    base = sample(0, tokens=1, model=small)[1].kv
    DiskStore(folder / "many").close()
    place = folder / "many" / "entries" / ONE.name / small.digest[:16]
    place.mkdir(parents=True, mode=0o700)
    memory = MemoryStore(count * 128)
    for number in range(count):
        key, entry = sample_key(number, base)
        memory.put(key, entry)
        with open(place / key.digest, "wb") as file:
            for part in EntryWriter(key, entry, "raw", 1.0, None):
                file.writelines(part)
    opened = seconds(lambda: DiskStore(folder / "many", deadline_s=600).close())
    reopened = seconds(lambda: DiskStore(folder / "many", deadline_s=600).close())
    result: dict[str, float] = {
        "keys": float(count), "index_rebuilt_s": round(opened, 2), "reopened_s": round(reopened, 2),
    }  # fmt: skip
    with memory, DiskStore(folder / "many", durable=False) as disk:
        for store in (memory, disk):
            times = []
            for number in range(0, 2 * count, max(1, count // 1000)):
                key, _ = sample_key(number, base)

                def once(store: Store = store, key: CacheKey = key) -> None:
                    handle = store.get(key)
                    if handle is not None:
                        handle.release()

                times.append(seconds(once) * 1e6)
            result[f"{store.name}_p50_us"] = round(statistics.median(times), 1)
            result[f"{store.name}_p95_us"] = round(statistics.quantiles(times, n=20)[-1], 1)
    return result


def sample_key(number: int, base: SegmentKV) -> tuple[CacheKey, Entry]:
    """A one-token key without making new KV."""
    segment = Segment((number,))
    key = CacheKey.of(ONE, fingerprint(1, 1, 4), segment, Recipe("isolated", "", "", False))
    return key, Entry(segment, base, Attributes())


def closeness(folder: Path) -> dict[str, object]:
    """Relative error (norm of the difference over norm) and size of the lossy encodings on normal random KV."""
    key, entry = sample(1, tokens=TOKENS, model=MODEL)
    result: dict[str, object] = {}
    for name in ("raw", "int8", "fp8"):
        with DiskStore(folder / name, encoding=name) as store:
            size = store.put(key, entry).nbytes
            out = empty_kv(MODEL, TOKENS)
            store.get_into(key, out)
            error = float((out.keys - entry.kv.keys).norm() / entry.kv.keys.norm())
            result[name] = {"relative_error": round(error, 5), "bytes_over_raw_kv": round(size / SIZE, 4)}
    return result


def main() -> None:
    """Run everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "kvcomm-bench")
    parser.add_argument("--out", type=Path, default=Path("results/bench-store.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keys", type=int, default=100_000)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=chosen.folder.parent, prefix=chosen.folder.name))
    try:
        found = {
            "command": "python benchmarks/store.py", "rounds": chosen.rounds, "bytes": SIZE, "threads": 1,
            "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
            **speed(folder, chosen.rounds), "look_up": look_up(folder, chosen.keys), "encodings": closeness(folder),
        }  # fmt: skip
    finally:
        shutil.rmtree(folder)
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
