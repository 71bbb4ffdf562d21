"""A real redis-server of a test's own: in a folder, on a Unix socket or on 127.0.0.1, ended with the test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
WAIT_S = 20.0


def needs_redis() -> None:
    """Skip where redis-py or the server is not installed."""
    pytest.importorskip("redis", reason="redis-py is not installed; pip install kvcomm[redis]")
    if PROGRAM is None:
        pytest.skip("no redis-server on this machine; make engines installs it")


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A process. ``kill`` and ``start`` may alternate; without ``save`` a start is with nothing in it."""

    def __init__(self, folder: Path, options: Sequence[str] = (), *, port: int = 0) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.port, self._options = folder, port, list(options)
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """As ``RedisStore`` takes it."""
        return f"127.0.0.1:{self.port}" if self.port else f"unix:{self.socket}"

    def option(self, name: str) -> str:
        """The value that an option was given."""
        return self._options[self._options.index(name) + 1]

    def start(self) -> None:
        """Begin, and wait until it takes connections."""
        command = [
            str(PROGRAM), "--port", "0", "--bind", "127.0.0.1", "--unixsocket", str(self.socket), "--unixsocketperm",
            "700", "--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no",
            "--loglevel", "warning", "--logfile", str(self.folder / "redis.log"),
        ]  # fmt: skip
        if self.port:
            command[2] = str(self.port)
        quiet = subprocess.DEVNULL  # an inherited pipe would keep whoever reads our output waiting
        self.process = subprocess.Popen([*command, *self._options], stdin=quiet, stdout=quiet, stderr=quiet)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self.process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.socket))
                    return
                except OSError:
                    time.sleep(0.01)
        raise RuntimeError((self.folder / "redis.log").read_text()[-2000:] or "redis-server did not start")

    def kill(self) -> None:
        """SIGKILL, and its socket away."""
        self._end(signal.SIGKILL)
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop answering, without going away."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on."""
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self._send(signal.SIGCONT)
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self._send(number)
            self.process.wait(WAIT_S)
            self.process = None

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
