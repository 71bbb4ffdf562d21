"""MooncakeStore beside bare put_from / get_into of as many bytes: one node, one client, loopback, sealing off and on.

``python -m benchmarks.mooncake --out results/mooncake.json``, as root, or where network namespaces are allowed: the
cluster runs inside one. Medians of rounds in which the ways take turns; every read is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvcomm.keys import CacheKey
from kvcomm.store import Entry, Keyring, empty_kv
from kvcomm.store.testing import fingerprint, same, sample
from kvcomm.transfer.mooncake import MooncakeStore
from kvcomm.transfer.mooncake_config import MooncakeConfig
from kvcomm.types import SegmentKV
from tests.transfer.mooncake_cluster import Cluster, private_network, why_not

MODEL = fingerprint(16, 8, 64)  # 64 KiB a token in float32
MIB = 1 << 20
DEADLINE_S = 60.0


class Bare:
    """Mooncake's own client, one registered buffer, one object a value: nothing is cut, checked or copied."""

    def __init__(self, store: MooncakeStore, nbytes: int) -> None:
        self._client = store._engine._client
        self._buffer = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        if self._client.register_buffer(self._buffer.data_ptr(), nbytes) != 0:
            raise RuntimeError("the buffer was not registered")
        self._how = store._engine._library.ReplicateConfig()

    def put(self, name: str) -> None:
        """Put the buffer as one object."""
        done = self._client.put_from(name, self._buffer.data_ptr(), self._buffer.numel(), self._how)  # type: ignore[attr-defined]
        if done != 0:
            raise RuntimeError(f"put_from gave {done}")

    def get(self, name: str) -> None:
        """Read it back into the buffer."""
        done = self._client.get_into(name, self._buffer.data_ptr(), self._buffer.numel())  # type: ignore[attr-defined]
        if done != self._buffer.numel():
            raise RuntimeError(f"get_into gave {done}")

    def remove(self, name: str) -> None:
        """Make room again."""
        self._client.batch_remove([name], True)


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(cluster: Cluster, mib: int, rounds: int) -> dict[str, object]:
    """MiB/s of each way at one size, and what part of the bare speed the store keeps."""
    key, entry = sample(1, tokens=mib * MIB // MODEL.bytes_per_token, model=MODEL)
    out = empty_kv(MODEL, len(entry.segment))
    config = cluster.config(MooncakeConfig(staging_bytes=128 * MIB))
    ring = Keyring(bytes(range(32)))
    times: dict[str, list[float]] = {}
    with MooncakeStore(config, deadline_s=DEADLINE_S) as plain, MooncakeStore(config, keyring=ring) as sealed:
        bare = Bare(plain, entry.kv.nbytes)
        stores = {"plain": plain, "sealed": sealed}
        for number in range(rounds + 1):
            order = ["bare", "plain", "sealed"]
            for way in order[number % 3 :] + order[: number % 3]:
                if way == "bare":
                    took = seconds(lambda: bare.put("bare")), seconds(lambda: bare.get("bare"))
                    bare.remove("bare")
                else:
                    took = store_round(stores[way], key, entry, out)
                if number:
                    times.setdefault(f"{way} put", []).append(took[0])
                    times.setdefault(f"{way} get", []).append(took[1])
    speed = {name: round(mib / statistics.median(t), 1) for name, t in times.items()}
    kept = {
        f"{way} {call}": round(speed[f"{way} {call}"] / speed[f"bare {call}"], 3)
        for way in ("plain", "sealed") for call in ("put", "get")
    }  # fmt: skip
    return {"mib": mib, "mib_per_s": speed, "of_bare": kept}


def store_round(store: MooncakeStore, key: CacheKey, entry: Entry, out: SegmentKV) -> tuple[float, float]:
    """Seconds of a put and of a get into memory that is there; the value is compared and removed."""
    out.keys.zero_()
    put = seconds(lambda: store.put(key, entry, deadline_s=DEADLINE_S))
    get = seconds(lambda: store.get_into(key, out, deadline_s=DEADLINE_S))
    if not same(out, entry.kv):
        raise RuntimeError("other bytes came back than were put")
    store.delete(key, deadline_s=DEADLINE_S)
    return put, get


def main() -> None:
    """Run and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64])
    given = parser.parse_args()
    reason = why_not()
    if reason:
        raise SystemExit(f"no Mooncake cluster can be started here: {reason}")
    with tempfile.TemporaryDirectory() as folder, private_network():
        with Cluster(Path(folder), node_mib=16 * max(given.mib)) as cluster:
            sizes = [measure(cluster, mib, given.rounds) for mib in given.mib]
    found = {"cores": os.cpu_count(), "machine": platform.machine(), "rounds": given.rounds, "sizes": sizes}
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
