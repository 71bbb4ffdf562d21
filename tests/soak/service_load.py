"""Overload, probes and strangers, in a short form for the suite and a long one for the soak."""

from __future__ import annotations

import random
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from kvcomm.store.testing import ONE, TWO, fingerprint, sample
from kvcomm.transfer.frame import PREAMBLE_BYTES, Kind, unpack
from kvcomm.transfer.remote import RemoteStore
from tests.serve.process import ServiceProcess
from tests.soak.isolation import foreign

CONNECTIONS = 8


def overload(seconds: float, bursts: int) -> dict[str, float]:
    """Look-ups a second of as many clients as may connect, before and after ten times as many try to.

    The others come in bursts of 72, each opened at once; what is measured is the time from connecting to the refusal.
    """
    with tempfile.TemporaryDirectory() as folder:
        with ServiceProcess(Path(folder) / "kept", "--max-connections", str(CONNECTIONS)) as service:
            before = _rate(service.address, seconds)
            latencies: list[float] = []
            held = [RemoteStore(service.address) for _ in range(CONNECTIONS)]
            for store in held:
                store.contains(sample(0)[0])
            for _ in range(bursts):
                latencies += _burst(service.address.removeprefix("unix:"), 9 * CONNECTIONS)
            for store in held:
                store.close()
            time.sleep(0.2)
            after = _rate(service.address, seconds)
    cuts = quantiles(latencies, n=100)
    return {
        "refused": len(latencies), "refused_p50_ms": 1000 * median(latencies), "refused_p99_ms": 1000 * cuts[98],
        "refused_max_ms": 1000 * max(latencies), "before_per_s": before, "after_per_s": after, "kept": after / before,
    }  # fmt: skip


def _rate(address: str, seconds: float) -> float:
    stores = [RemoteStore(address) for _ in range(CONNECTIONS)]
    counts = [0] * CONNECTIONS
    key = sample(0)[0]
    for store in stores:
        store.contains(key)
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < end:
            stores[number].contains(key)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    return sum(counts) / seconds


def _burst(path: str, count: int) -> list[float]:
    """Seconds from connecting to a whole refusal, of ``count`` connections opened one right after the other."""
    poll = select.poll()
    begun: dict[int, tuple[socket.socket, float]] = {}
    for _ in range(count):
        sock = socket.socket(socket.AF_UNIX)
        started = time.perf_counter()
        sock.connect(path)
        begun[sock.fileno()] = sock, started
        poll.register(sock, select.POLLIN)
    found = []
    while begun:
        ready = poll.poll(5000)
        now = time.perf_counter()
        if not ready:
            raise AssertionError(f"{len(begun)} connections were neither served nor refused in 5 s")
        for number, _ in ready:
            sock, started = begun.pop(number)
            poll.unregister(sock)
            if unpack(sock.recv(PREAMBLE_BYTES)).kind is not Kind.REFUSAL:
                raise AssertionError("a connection beyond the limit was served")
            found.append(now - started)
            sock.close()
    return found


def probes(each: int) -> dict[str, float]:
    """How well a tenant can tell by latency whether another has a text: AUC of ``each`` probes of texts that the other
    has against as many that he has not; and in the control of texts that the prober has himself."""
    wide = fingerprint(8, 2, 64)
    with tempfile.TemporaryDirectory() as folder, ServiceProcess(Path(folder) / "kept", "--no-durable") as service:
        with RemoteStore(service.address) as store:
            chance = random.Random(5)
            for number in range(each):
                store.put(*sample(number, tokens=64, model=wide, namespace=TWO))
            across = _auc(each, chance, lambda n: _asked(store, n))
            for number in range(each):
                store.put(*sample(number, tokens=64, model=wide, namespace=ONE))
            control = _auc(each, chance, lambda n: _asked(store, n))
    return {"each": each, "auc_across": across, "auc_control": control}


def _asked(store: RemoteStore, number: int) -> float:
    """The least seconds of three times that the prober asks for a text and reads what there is."""
    key = sample(number, tokens=64, model=fingerprint(8, 2, 64), namespace=ONE)[0]
    found = []
    for _ in range(3):
        started = time.perf_counter()
        handle = store.get(key)
        if handle is not None:
            with handle:
                handle.read()
        found.append(time.perf_counter() - started)
    return min(found)


def _auc(each: int, chance: random.Random, asked: Callable[[int], float]) -> float:
    """Texts 0 to ``each`` against those after them, in random order, each asked about once after some to warm up."""
    for number in range(20):
        asked(10 * each + number)
    order = list(range(2 * each))
    chance.shuffle(order)
    seconds = {number: asked(number) for number in order}
    there, not_there = [seconds[n] for n in range(each)], [seconds[n] for n in range(each, 2 * each)]
    wins = sum((a > b) + 0.5 * (a == b) for a in there for b in not_there)
    return wins / each**2


def strangers(tries: int) -> dict[str, int]:
    """Look-ups of other namespaces' texts, through the service; see ``isolation.foreign``."""
    with tempfile.TemporaryDirectory() as folder, ServiceProcess(Path(folder) / "kept", "--no-durable") as service:
        return foreign(RemoteStore(service.address), tries)
