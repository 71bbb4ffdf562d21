"""The service killed under traffic, clients that vanish, ten times overload, probes of other tenants, strangers.

python -m tests.soak.service --kills 100 --vanish 10000 --out results/soak-service.json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from kvcomm.errors import AccessDenied, KVCommError, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.store.testing import holds, sample
from kvcomm.transfer.address import Address
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.remote import RemoteStore
from tests.serve.here import service_here
from tests.serve.process import ServiceProcess
from tests.soak.record import record
from tests.soak.service_load import overload, probes, strangers

SLACK_S = 0.1
DEADLINE_S = 1.0


def kills(count: int) -> dict[str, object]:
    """Four clients put and get through ``count`` kills; afterwards everything acknowledged must be there."""
    acknowledged: set[int] = set()
    late: list[float] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ServiceProcess(Path(folder) / "kept") as service:
        stop = threading.Event()

        def client(seed: int) -> None:
            chance, number = random.Random(seed), seed
            store = RemoteStore(service.address, breaker=Breaker(limit=10**9))
            while not stop.is_set():
                started = time.monotonic()
                try:
                    if store.put(*sample(number), deadline_s=DEADLINE_S).durable:
                        acknowledged.add(number)
                        holds(store, chance.choice(tuple(acknowledged)))
                        number += 4
                except StoreUnavailable:
                    if time.monotonic() - started > 3 * (DEADLINE_S + SLACK_S):
                        late.append(time.monotonic() - started)
                    time.sleep(0.01)
                except (AssertionError, AccessDenied, KVCommError) as error:
                    wrong.append(f"{type(error).__name__}: {error}")
            store.close()

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        chance = random.Random(1)
        for _ in range(count):
            time.sleep(0.2 + chance.random())
            service.kill()
            service.start()
        stop.set()
        for thread in threads:
            thread.join(60)
        with RemoteStore(service.address) as store:
            lost = [number for number in acknowledged if not holds(store, number)]
    return {"kills": count, "acknowledged": len(acknowledged), "lost": len(lost), "late": len(late), "wrong": wrong[:5]}


def vanish(count: int) -> dict[str, object]:
    """``count`` clients begin a put and go; what was reserved is zero once the lease is over."""
    most = 0
    with tempfile.TemporaryDirectory() as folder, service_here(Path(folder)) as (service, address):
        for number in range(count):
            wire = Address.parse(address).connect(Deadline(5.0))
            wire.send(Kind.REQUEST, 1, {"call": "hello", "token": "one"}, Deadline(5.0))
            begin = {"call": "begin", "upload": f"{number:032x}", "nbytes": 4096, "lease_ms": 2000, "entry": False}
            wire.send(Kind.REQUEST, 2, begin, Deadline(5.0))
            for _ in range(2):
                wire.receive(Deadline(5.0))
            wire.close()
            most = max(most, service.core.uploads.reserved()[0])
        time.sleep(2.5)
        reserved, uploads = service.core.uploads.reserved()
        connections = service.server.connections
    return {
        "clients": count, "most_reserved_bytes": most, "reserved_bytes": reserved, "uploads": uploads,
        "connections": connections,
    }  # fmt: skip


def main() -> None:
    """Run, and write what was found; ends with status 1 if anything was lost, left over or beyond its limit."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=100)
    arguments.add_argument("--vanish", type=int, default=10000)
    arguments.add_argument("--probes", type=int, default=400)
    arguments.add_argument("--strangers", type=int, default=100_000)
    arguments.add_argument("--overload-s", type=float, default=10.0)
    arguments.add_argument("--out", type=Path, default=Path("results/soak-service.json"))
    chosen = arguments.parse_args()
    command = f"python -m tests.soak.service --kills {chosen.kills} --vanish {chosen.vanish} --probes {chosen.probes}"
    command += f" --strangers {chosen.strangers} --overload-s {chosen.overload_s}"
    killed, vanished = kills(chosen.kills), vanish(chosen.vanish)
    record(chosen.out, "kills", command, killed)
    record(chosen.out, "vanish", command, vanished)
    loaded, probed = overload(chosen.overload_s, 20), probes(chosen.probes)
    record(chosen.out, "overload", command, dict(loaded))
    record(chosen.out, "probes", command, dict(probed))
    strange = strangers(chosen.strangers)
    record(chosen.out, "strangers", command, dict(strange))
    bad = killed["lost"] or killed["late"] or killed["wrong"] or vanished["reserved_bytes"] or vanished["connections"]
    bad = bad or loaded["refused_p99_ms"] > 50 or loaded["kept"] < 0.95
    bad = bad or abs(probed["auc_across"] - 0.5) > 0.06 or probed["auc_control"] < 0.95
    bad = bad or strange["foreign_hits"] or strange["own_hits"] != strange["own_tries"]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
