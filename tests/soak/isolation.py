"""Isolation of namespaces in every store and composition.

python -m tests.soak.isolation --tries 100000 --out results/soak-store.json
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import (
    Attributes,
    DiskStore,
    Keyring,
    MemoryStore,
    Promotion,
    Selective,
    Store,
    TieredStore,
    WriteBack,
    shared_memory_store,
)
from kvcomm.store.testing import ONE, TWO, sample
from kvcomm.types import Namespace
from tests.soak.record import record

ROOM = 100  # entries that each tier of a composition holds
SIZE = 384
RING = Keyring(b"k" * 32)


def memory(folder: Path) -> MemoryStore:
    """Room for 100 entries."""
    return MemoryStore(ROOM * SIZE)


def disk(folder: Path, keyring: Keyring | None = None) -> DiskStore:
    """Room for 100 entries."""
    return DiskStore(folder / "disk", max_entries=ROOM, durable=False, keyring=keyring)


COMPOSITIONS: dict[str, Callable[[Path], Store]] = {
    "memory": memory,
    "disk": disk,
    "sealed disk": lambda f: disk(f, RING),
    "shared memory": lambda f: shared_memory_store("x", ROOM * 4096, root=f),
    "memory over disk": lambda f: TieredStore([memory(f), disk(f)]),
    "memory over sealed disk, write-back": lambda f: TieredStore([memory(f), disk(f, RING)], placement=WriteBack()),
    "device over memory over disk, selective": lambda f: TieredStore(
        [MemoryStore(10 * SIZE, name="device"), memory(f), disk(f)], placement=Selective(), promotion=Promotion(1)
    ),
}


def foreign(store: Store, tries: int) -> dict[str, int]:
    """Own entries are hits; the same tokens under other namespaces, recipes and groups never are."""
    chance = random.Random(2)
    others = [TWO, Namespace("One"), Namespace("one."), Namespace("one-"), Namespace("on"), Namespace("public")]
    for number in range(20):
        store.put(*sample(number, attributes=Attributes(group="g")))
    hits = own = own_tries = 0
    with store:
        for turn in range(tries):
            key, _ = sample_key(chance.randrange(20), ONE)
            if turn % 20 == 0:
                own_tries += 1
                handle = store.get(key)
                own += handle is not None
                if handle is not None:
                    handle.release()
            space = chance.choice(others)
            content = key.content if turn % 2 else key.content[::-1]
            tried = CacheKey(space, key.fingerprint, content, key.recipe)
            if turn % 7 == 0:
                tried = CacheKey(ONE, key.fingerprint, key.content, Recipe("prompt", str(turn), "x", bool(turn % 2)))
            hits += store.get(tried) is not None
            if turn % 50 == 0:
                hits += store.contains(tried) + store.touch(tried) + store.delete(tried)
                hits += store.delete_group(space, "g") + store.delete_namespace(space)
                hits += sum(e.key.namespace != space for e in store.entries(space))
                hits += store.stats(space).entries
    return {"tries": tries, "foreign_hits": int(hits), "own_tries": own_tries, "own_hits": own}


_made: dict[tuple[int, str], tuple[CacheKey, object]] = {}


def sample_key(number: int, namespace: Namespace) -> tuple[CacheKey, object]:
    """``sample``, remembered: making the KV again would take most of the time."""
    if (number, namespace.name) not in _made:
        _made[number, namespace.name] = sample(number, namespace=namespace)
    return _made[number, namespace.name]


def noisy(make: Callable[[Path], Store], folder: Path, rounds: int) -> dict[str, float]:
    """Hit rate of a tenant alone, and while another puts ten new entries between any two of its gets."""
    rates = []
    for noise in (0, 10):
        chance = random.Random(3)
        hits = 0
        with make(folder / f"noise{noise}") as store:
            for turn in range(rounds):
                key, entry = sample(min(60, int(chance.paretovariate(0.8))))
                handle = store.get(key)
                if handle is None:
                    store.put(key, entry)
                else:
                    hits += 1
                    handle.release()
                for n in range(noise):
                    store.put(*sample(1000 + turn * noise + n, namespace=TWO))
        rates.append(hits / rounds)
    return {"rounds": rounds, "alone": round(rates[0], 4), "beside_noise": round(rates[1], 4)}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("results/soak-store.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    for name, make in COMPOSITIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = foreign(make(Path(folder)), chosen.tries)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("memory", "disk", "memory over disk"):
            found[f"noisy neighbour, {name}"] = noisy(COMPOSITIONS[name], Path(folder) / name, 2000)
    record(chosen.out, "isolation", f"python -m tests.soak.isolation --tries {chosen.tries}", found)


if __name__ == "__main__":
    main()
