"""Very many small keys through memory and disk: memory, file handles, threads flat; limits never exceeded.

    python -m tests.soak.keys --keys 1000000 --out results/soak-store.json

The disk tier runs without fsync here: what is looked at is growth, not durability.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcomm.errors import StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import (
    Attributes,
    DiskStore,
    Entry,
    Handle,
    MemoryStore,
    Priority,
    Promotion,
    Quota,
    Store,
    TieredStore,
)
from kvcomm.store.testing import fingerprint
from kvcomm.types import Namespace, Segment, SegmentKV
from tests.soak.record import record

MODEL = fingerprint(1, 1, 4)
TENANTS = [Namespace(f"tenant{n}") for n in range(4)]
RECIPE = Recipe("isolated", "", "", False)
MEMORY_ENTRIES, DISK_ENTRIES, TENANT_ENTRIES = 256, 1024, 400


def item(number: int, chance: random.Random) -> tuple[CacheKey, Entry]:
    """The key of a number, and an entry whose KV tells the number."""
    kv = torch.full((1, 1, 1, 4), float(number % 2**20))
    segment = Segment((number,))
    attributes = Attributes(chance.choice(list(Priority)), f"g{number % 50}", chance.choice([None, None, 0.5, 60.0]))
    return CacheKey.of(TENANTS[number % 4], MODEL, segment, RECIPE), Entry(segment, SegmentKV(kv, kv), attributes)


def measure(folder: Path) -> dict[str, int]:
    """What must stay flat."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024, "handles": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "index_kib": sum(p.stat().st_size for p in folder.glob("index.sqlite*")) // 1024,
        "files": sum(len(names) for _, _, names in os.walk(folder)),
    }  # fmt: skip


def check_limits(store: TieredStore) -> None:
    """Raise RuntimeError if a tier holds one entry, or a byte, too many."""
    for tier, most in zip(store.tiers, (MEMORY_ENTRIES, DISK_ENTRIES), strict=True):
        found = tier.stats()
        if found.entries > most or found.nbytes > found.max_bytes:
            raise RuntimeError(f"{tier.name} holds {found.entries} entries, {found.nbytes} bytes; limit {most}")


def run(
    folder: Path, keys: int, samples: int = 50, tell: Callable[[dict[str, object]], None] = lambda found: None
) -> dict[str, object]:
    """Put ``keys`` keys, with gets, pins that are forgotten, renewals and deletions between; tells how it stands."""
    found: dict[str, object] = {}
    chance = random.Random(5)
    quota = Quota(max_entries=TENANT_ENTRIES)
    disk = DiskStore(folder, max_entries=DISK_ENTRIES, max_bytes=4 << 20, quota=quota, durable=False, max_handles=64)
    memory = MemoryStore(1 << 15, max_entries=MEMORY_ENTRIES)
    store = TieredStore([memory, disk], promotion=Promotion(min_hits=1))
    taken: list[Handle | None] = [None] * 16
    seen: list[dict[str, int]] = []
    hits = refused = 0
    began = time.monotonic()
    for number in range(keys):
        try:
            store.put(*item(number, chance))
        except StoreUnavailable:
            refused += 1
        check_limits(store)
        wanted = max(0, number - int(chance.expovariate(1 / 400)))
        hits += look(store, wanted, taken, chance)
        if number % 97 == 0:
            store.touch(item(wanted, chance)[0], ttl_s=1.0)
        if number % 101 == 0:
            store.delete(item(wanted, chance)[0])
        if number % 9973 == 0:
            store.delete_group(TENANTS[number % 4], f"g{number % 50}")
        if (number + 1) % max(1, keys // samples) == 0:
            seen.append(measure(folder) | {"keys": number + 1})
            found = {
                "keys": number + 1, "hits": hits, "refused": refused, "seconds": round(time.monotonic() - began, 1),
                "limits_exceeded": 0, "first": seen[len(seen) // 10], "last": seen[-1], "growth": growth(seen),
                "most": {name: max(s[name] for s in seen) for name in seen[0]},
            }  # fmt: skip
            tell(found)
    taken.clear()
    store.close()
    return found


def look(store: Store, number: int, taken: list[Handle | None], chance: random.Random) -> bool:
    """Get and compare; one in fifty handles is kept for a while and then forgotten instead of released."""
    handle = store.get(item(number, chance)[0], lease_s=0.5)
    if handle is None:
        return False
    if float(handle.read().keys[0, 0, 0, 0]) != float(number % 2**20):
        raise RuntimeError(f"key {number} gave other bytes")
    if chance.random() < 0.02:
        taken[chance.randrange(len(taken))] = handle
    else:
        handle.release()
    return True


def growth(seen: list[dict[str, int]]) -> dict[str, float]:
    """Largest value of the last half over the largest of the first half, once a tenth is past."""
    settled = seen[len(seen) // 10 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    return {name: round(max(s[name] for s in late) / max([1, *(s[name] for s in early)]), 3) for name in seen[0]}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("results/soak-store.json"))
    parser.add_argument("--folder", type=Path, default=None, help="where to put the store; a tmpfs is fastest")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        command = f"python -m tests.soak.keys --keys {chosen.keys}"
        run(Path(folder) / "store", chosen.keys, tell=lambda found: record(chosen.out, "keys", command, found))


if __name__ == "__main__":
    main()
