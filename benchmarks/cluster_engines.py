"""What the processes of ``benchmarks.cluster`` share KV through: the anchor service, Redis, or a Mooncake cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcomm.store import Store

NODE_MIB = 1024


@dataclass(frozen=True)
class SharedBy:
    """One way to share.

    Attributes:
        label: what results call it.
        serve: starts it, its files in a folder, for the time of a ``with``; gives its address.
        connect: a client's store, from the address.
    """

    label: str
    serve: Callable[[Path], AbstractContextManager[str]]
    connect: Callable[[str], Store]


@contextmanager
def _serve_service(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "kvcomm.cli", "anchors", "serve", "--dir", str(folder / "kept")]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield service.stdout.readline().split()[-1] if service.stdout is not None else ""
    finally:
        service.terminate()
        service.wait(30)


def _connect_service(address: str) -> Store:
    from kvcomm.transfer.remote import RemoteStore

    return RemoteStore(address)


@contextmanager
def _serve_redis(folder: Path) -> Iterator[str]:
    from benchmarks.redis import Server

    server = Server()
    try:
        yield f"unix:{server.path}"
    finally:
        server.stop()


def _connect_redis(address: str) -> Store:
    from kvcomm.transfer.redis import RedisStore

    return RedisStore(address)


@contextmanager
def _serve_mooncake(folder: Path) -> Iterator[str]:
    from tests.transfer.mooncake_cluster import Cluster, private_network, why_not

    reason = why_not()
    if reason:
        raise SystemExit(f"no Mooncake cluster can be started here: {reason}")
    with private_network(), Cluster(folder, node_mib=NODE_MIB) as cluster:
        yield f"{cluster.address} {folder / 'catalogue'}"


def _connect_mooncake(address: str) -> Store:
    """The catalogue, which tells a process what others hold, lies in a folder here; the anchor service is for hosts."""
    from kvcomm.store import DiskStore
    from kvcomm.transfer.mooncake import MooncakeStore
    from kvcomm.transfer.mooncake_config import MooncakeConfig

    master, catalogue = address.split(" ", 1)
    return MooncakeStore(MooncakeConfig(master=master), blobs=DiskStore(Path(catalogue)).blobs)


ENGINES = {
    "service": SharedBy("anchor service, Unix socket", _serve_service, _connect_service),
    "redis": SharedBy("redis-server, Unix socket", _serve_redis, _connect_redis),
    "mooncake": SharedBy(
        "Mooncake: a master and a node of 1 GiB, TCP over loopback", _serve_mooncake, _connect_mooncake
    ),
}
