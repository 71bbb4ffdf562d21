"""RedisStore beside redis-py alone, on one server and in one run.

``python -m benchmarks.redis --out results/bench-redis.json``

redis-py alone sets and gets one value as large as the entry, with its own connection and no checks. Start it with -m.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis
import torch

from kvcomm.errors import InvalidInput
from kvcomm.store import Keyring, empty_kv
from kvcomm.store.testing import fingerprint, sample
from kvcomm.transfer.redis import RedisStore

MODEL = fingerprint(16, 4, 64)
TOKENS = {16: 512, 64: 2048}
TARGET = 0.7
WAIT_S = 10.0


class Server:
    """A redis-server on a Unix socket in a folder of its own."""

    def __init__(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise InvalidInput("no redis-server on this machine; install it, for example with make engines")
        self._folder = tempfile.TemporaryDirectory(prefix="kvcomm-redis-")
        self.path = Path(self._folder.name) / "redis.sock"
        quiet = subprocess.DEVNULL
        options = ["--port", "0", "--unixsocket", str(self.path), "--unixsocketperm", "700", "--save", ""]
        self._process = subprocess.Popen(
            [program, *options, "--dir", self._folder.name], stdin=quiet, stdout=quiet, stderr=quiet
        )
        end = time.monotonic() + WAIT_S
        while not self.path.exists() and time.monotonic() < end:
            time.sleep(0.01)

    def stop(self) -> None:
        """End it and remove its folder."""
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._folder.cleanup()


def measure(server: Server, mib: int, rounds: int) -> dict[str, object]:
    """Median MiB/s at one size; the calls take turns and the first round is not counted."""
    tokens = TOKENS[mib]
    entries = [sample(number, tokens=tokens, model=MODEL) for number in range(2)]
    payload = memoryview(torch.cat([entries[0][1].kv.keys.reshape(-1), entries[0][1].kv.values.reshape(-1)]).numpy())
    payload = payload.cast("B")
    out = empty_kv(MODEL, tokens)
    out.keys.zero_()
    out.values.zero_()
    alone = redis.Redis(unix_socket_path=str(server.path), protocol=2)
    stores = {
        "store": RedisStore(f"unix:{server.path}"),
        "sealed": RedisStore(f"unix:{server.path}", prefix="sealed", keyring=Keyring(secrets.token_bytes(32))),
    }
    puts: dict[str, Callable[[], object]] = {"alone": lambda: alone.set("alone", payload)}
    gets: dict[str, Callable[[], object]] = {"alone": lambda: alone.get("alone")}
    key, entry = entries[0]
    for name, store in stores.items():
        puts[name] = lambda s=store: s.put(key, entry)  # type: ignore[misc]
        gets[name] = lambda s=store: s.get_into(key, out)  # type: ignore[misc]
    times: dict[str, dict[str, list[float]]] = {"put": {n: [] for n in puts}, "get": {n: [] for n in puts}}
    names = list(puts)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in stores:
                stores[name].delete(key)
            else:
                alone.delete("alone")
            for kind, calls in (("put", puts), ("get", gets)):
                start = time.perf_counter()
                found = calls[name]()
                took = time.perf_counter() - start
                if not found:
                    raise RuntimeError(f"{kind} of {name} found nothing")
                if number:
                    times[kind][name].append(took)
    if not torch.equal(out.keys, entry.kv.keys) or not torch.equal(out.values, entry.kv.values):
        raise RuntimeError("the store gave other bytes")
    for each in (alone, *stores.values()):
        each.close()
    rates = {k: {n: round(mib / statistics.median(t), 1) for n, t in of.items()} for k, of in times.items()}
    ratio = {k: round(of["store"] / of["alone"], 3) for k, of in rates.items()}
    return {"mib_s": rates, "over_alone": ratio, "reached": all(value >= TARGET for value in ratio.values())}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    server = Server()
    try:
        client = redis.Redis(unix_socket_path=str(server.path))
        version = client.info("server")["redis_version"]
        client.close()
        result = {
            "command": "python -m benchmarks.redis", "rounds": chosen.rounds, "threads": torch.get_num_threads(),
            "torch": torch.__version__, "redis_py": redis.__version__, "redis": version, "target": TARGET,
            "python": platform.python_version(), "cores": os.cpu_count(), "transport": "Unix socket",
            "sizes_mib": {str(mib): measure(server, mib, chosen.rounds) for mib in TOKENS},
        }  # fmt: skip
    finally:
        server.stop()
    text = json.dumps(result, indent=1)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
