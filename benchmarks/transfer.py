"""The anchor service beside a bare socket of the same kind, in one run: rates of large values, latency of look-ups.

``python -m benchmarks.transfer --out results/bench-transfer.json``. The service is a process of its own with its folder
in /dev/shm; the bare sockets' other end is a process too, both ends with buffers that were touched in advance. Rounds
take turns, medians are reported. What is got is compared with what was put.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.common import rounds
from eval.files.output import write_json
from kvcomm.errors import StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import Entry, empty_kv
from kvcomm.transfer.remote import RemoteStore
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

SPACE = Namespace("bench")
RECIPE = Recipe("isolated", "", "neutral", False)
MODEL = ModelFingerprint("bench", "", "", "float32", "", "", 16, 4, 64)  # 32 KiB a token
SHM = Path("/dev/shm")


def entry(mib: int, number: int) -> tuple[CacheKey, Entry]:
    """A key and an entry of ``mib`` MiB of KV, another one for each number."""
    tokens = (mib << 20) // MODEL.bytes_per_token
    segment = Segment(tuple([number] * tokens))
    shape = (MODEL.n_layers, MODEL.n_kv_heads, tokens, MODEL.head_dim)
    parts = (torch.full(shape, float(number) + n).add_(torch.arange(tokens)[None, None, :, None]) for n in (0.25, 0.5))
    return CacheKey.of(SPACE, MODEL, segment, RECIPE), Entry(segment, SegmentKV(*parts))


class Bare:
    """A bare socket and its other end in another process, which sends and receives as told."""

    def __init__(self, tcp: bool, nbytes: int) -> None:
        self.nbytes = nbytes
        self._data = memoryview(bytearray(os.urandom(1 << 20) * (nbytes >> 20)))
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_other_end, args=(theirs, tcp, nbytes), daemon=True)
        self._process.start()
        address = self._pipe.recv()
        self._sock = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self._sock.connect(address)
        _widen(self._sock)

    def put(self) -> float:
        """Seconds to send all bytes and get a byte back."""
        started = time.perf_counter()
        self._pipe.send("take")
        self._sock.sendall(self._data)
        self._sock.recv(1)
        return time.perf_counter() - started

    def get(self) -> float:
        """Seconds to ask with a byte and receive all."""
        started = time.perf_counter()
        self._pipe.send("give")
        _fill(self._sock, self._data)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the other process."""
        self._pipe.send("end")
        self._process.join(10)
        self._sock.close()


def _other_end(pipe: Connection, tcp: bool, nbytes: int) -> None:
    data = memoryview(bytearray(b"x" * nbytes))
    listener = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
    with tempfile.TemporaryDirectory() as folder:
        listener.bind(("127.0.0.1", 0) if tcp else f"{folder}/bare.sock")
        listener.listen(1)
        pipe.send(listener.getsockname())
        sock, _ = listener.accept()
    _widen(sock)
    while (told := pipe.recv()) != "end":
        if told == "take":
            _fill(sock, data)
            sock.sendall(b"x")
        else:
            sock.sendall(data)


def _widen(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _fill(sock: socket.socket, data: memoryview) -> None:
    at = 0
    while at < len(data):
        done = sock.recv_into(data[at:])
        if not done:
            raise SystemExit("the bare socket was closed")
        at += done


class Served:
    """A service process and a store on it."""

    def __init__(self, folder: Path, tcp: bool) -> None:
        where = ["--host", "127.0.0.1"] if tcp else []
        command = [sys.executable, "-m", "kvcomm.cli", "anchors", "serve", "--dir", str(folder), "--no-durable", *where]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None:
            raise SystemExit("the service has no output")
        self.address = self._process.stdout.readline().split()[-1]
        self.store = RemoteStore(self.address)

    def put(self, mib: int) -> Callable[[], float]:
        """A call that puts an entry which is not there, and deletes it after the clock has stopped."""
        key, value = entry(mib, 1)

        def put() -> float:
            started = time.perf_counter()
            stored = self.store.put(key, value, deadline_s=60).stored
            seconds = time.perf_counter() - started
            if not stored or not self.store.delete(key):
                raise SystemExit("an entry was there already")
            return seconds

        return put

    def get(self, mib: int) -> Callable[[], float]:
        """A call that reads an entry into memory that was touched in advance."""
        key, value = entry(mib, 2)
        self.store.put(key, value, deadline_s=60)
        out = empty_kv(MODEL, len(value.segment))
        out.keys.zero_()
        out.values.zero_()

        def get() -> float:
            started = time.perf_counter()
            self.store.get_into(key, out, deadline_s=60)
            seconds = time.perf_counter() - started
            if not (torch.equal(out.keys, value.kv.keys) and torch.equal(out.values, value.kv.values)):
                raise SystemExit("other bytes came back than were put")
            out.keys.zero_()
            out.values.zero_()
            return seconds

        return get

    def close(self) -> None:
        """End the service."""
        self.store.close()
        self._process.terminate()
        self._process.wait(30)


def rates(tcp: bool, mib: int, repeats: int) -> dict[str, Any]:
    """MiB/s of bare socket and service, and their ratios."""
    bare = Bare(tcp, mib << 20)
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        served = Served(Path(folder) / "kept", tcp)
        calls = {
            "bare_put": bare.put, "put": served.put(mib), "bare_get": bare.get, "get": served.get(mib),
        }  # fmt: skip
        for call in calls.values():
            call()
        found = rounds(calls, repeats)
        served.close()
    bare.close()
    rate = {name: mib / median(seconds) for name, seconds in found.items()}
    return {
        "socket": "tcp" if tcp else "unix", "mib": mib, "mib_per_s": rate,
        "put_ratio": rate["put"] / rate["bare_put"], "get_ratio": rate["get"] / rate["bare_get"], "seconds": found,
    }  # fmt: skip


def lookups(clients: int, per_second: float, seconds: float) -> dict[str, float]:
    """Latency of ``contains`` from ``clients`` threads, each with a connection, at a fixed rate all together.

    A look-up counts from when it was due, so that one that waits behind a slow one is not forgiven.
    """
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        served = Served(Path(folder) / "kept", False)
        keys = []
        for number in range(32):
            segment = Segment((number, 1, 2))
            model = ModelFingerprint("bench", "", "", "float32", "", "", 1, 1, 4)
            key = CacheKey.of(SPACE, model, segment, RECIPE)
            served.store.put(key, Entry(segment, SegmentKV(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))))
            keys.append(key)
        latencies: list[float] = []
        begin = time.perf_counter() + 0.5
        each = clients / per_second

        def client(number: int) -> None:
            mine = []
            due = begin + number * each / clients
            while due < begin + seconds:
                time.sleep(max(0.0, due - time.perf_counter()))
                if not served.store.contains(keys[(number + len(mine)) % len(keys)]):
                    raise StoreUnavailable("an entry is gone; give the service more room")
                mine.append(time.perf_counter() - due)
                due += each
            latencies.extend(mine)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - begin
        served.close()
    cuts = quantiles(latencies, n=1000)
    return {
        "clients": clients, "asked_per_s": per_second, "done_per_s": len(latencies) / took, "count": len(latencies),
        "p50_ms": 1000 * cuts[499], "p99_ms": 1000 * cuts[989], "p999_ms": 1000 * cuts[998],
    }  # fmt: skip


def main() -> None:
    """Measure and print; write only with ``--out``."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--mib", type=int, nargs="+", default=[16, 64])
    arguments.add_argument("--seconds", type=float, default=20.0)
    chosen = arguments.parse_args()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.transfer", "repeats": chosen.repeats, "cores": os.cpu_count(),
        "python": sys.version.split()[0], "large": [],
    }  # fmt: skip
    for tcp in (False, True):
        for mib in chosen.mib:
            found = rates(tcp, mib, chosen.repeats)
            result["large"].append(found)
            print(f"{found['socket']} {mib} MiB:", {name: round(r) for name, r in found["mib_per_s"].items()})
            print(f"  put {found['put_ratio']:.2f}, get {found['get_ratio']:.2f} of the bare socket", flush=True)
    result["lookups"] = lookups(8, 1000.0, chosen.seconds)
    print(result["lookups"])
    if chosen.out is not None:
        write_json(chosen.out, result)


if __name__ == "__main__":
    main()
