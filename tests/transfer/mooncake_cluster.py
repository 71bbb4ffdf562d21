"""A real Mooncake cluster for tests, inside a private network namespace: its ports bind to all interfaces otherwise."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType

from kvcomm.transfer.mooncake_config import MooncakeConfig

_CLONE_NEWNET = 0x40000000
_PORT, _SECOND, _ETCD = 50051, 50052, 2379
NODE_MIB = 64


@cache
def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake is not installed (kvcomm[mooncake])"
    # Loaded elsewhere: its etcd client's threads would otherwise stay outside the private network.
    loads = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if loads.returncode:
        return f"mooncake does not load: {loads.stderr.strip().splitlines()[-1]}"
    if shutil.which("ip") is None or shutil.which("setpriv") is None:
        return "ip (iproute2) or setpriv (util-linux) is not installed"
    allowed = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace can be made: {allowed.stderr.strip()}" if allowed.returncode else ""


@cache
def _network() -> int:
    """A network with nothing but loopback, made once a process: Mooncake's threads stay where its first client was."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    finally:
        _call("setns", before, _CLONE_NEWNET)
        os.close(before)


@contextmanager
def private_network() -> Iterator[None]:
    """This thread, and what it starts, in the network of the cluster; then back."""
    inside, before = _network(), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("setns", inside, _CLONE_NEWNET)
        yield
    finally:
        _call("setns", before, _CLONE_NEWNET)
        os.close(before)


def _call(name: str, *given: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*given) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


class Cluster:
    """A master and its nodes. With ``etcd``, two masters of which one stands by."""

    def __init__(self, folder: Path, *flags: str, nodes: int = 1, node_mib: int = NODE_MIB, ha: bool = False) -> None:
        self._folder, self._flags, self._mib, self._ha = folder, flags, node_mib, ha
        self._all: list[subprocess.Popen[bytes]] = []
        self.masters: list[subprocess.Popen[bytes]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._stores = 0
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if ha:
                self._start("etcd", ["etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error"])
                _wait_for(_ETCD)
            self.start_master(_PORT)
            _wait_for(_PORT)
            if ha:
                self.start_master(_SECOND)
            for _ in range(nodes):
                self.start_node()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What clients are told."""
        return f"etcd://127.0.0.1:{_ETCD}" if self._ha else f"127.0.0.1:{_PORT}"

    def config(self, config: MooncakeConfig | None = None) -> MooncakeConfig:
        """A client's configuration, each with names of its own."""
        self._stores += 1
        base = config or MooncakeConfig(staging_bytes=16 << 20)
        return replace(base, master=self.address, prefix=f"test-{self._stores}/")

    def start_master(self, port: int = _PORT) -> None:
        """Start a master; in high availability the first becomes the leader."""
        import mooncake

        program = Path(mooncake.__file__).parent / "mooncake_master"
        ha = ["--enable_ha=true", f"--etcd_endpoints=127.0.0.1:{_ETCD}", "--enable_oplog=true"] if self._ha else []
        given = [
            "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1",
            f"--metrics_port={port + 1000}", "--default_kv_lease_ttl=1s", *ha, *self._flags,
        ]  # fmt: skip
        self.masters.append(self._start(f"master-{port}", [str(program), *given]))

    def start_node(self) -> None:
        """Start a node and wait until the master has it."""
        script = str(Path(__file__).with_name("mooncake_node.py"))
        node = self._start("node", [sys.executable, script, self.address, str(self._mib)])
        assert node.stdout is not None
        for line in node.stdout:
            if line.startswith(b"node "):
                if line != b"node 0\n":
                    raise RuntimeError(f"a node did not start: {line!r}; see {self._folder}")
                self.nodes.append(node)
                return
        raise RuntimeError(f"a node ended; see {self._folder}")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL, and wait until it is gone."""
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End everything that was started."""
        for process in self._all:
            if process.poll() is None:
                self.kill(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if name == "node" else log, stderr=log,
            )  # fmt: skip
        self._all.append(process)
        return process


def eventually(what: Callable[[], bool], within_s: float) -> float:
    """Seconds until ``what`` was true. Raises AssertionError if it took too long."""
    start = time.monotonic()
    while not what():
        took = time.monotonic() - start
        assert took < within_s, f"not after {took:.1f} s"
        time.sleep(0.2)
    return time.monotonic() - start


def _wait_for(port: int, within_s: float = 60) -> None:
    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(listening, within_s)
