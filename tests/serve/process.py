"""A real service process for the tests, as ``kvcomm anchors serve`` starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Self


class ServiceProcess:
    """Started when made; ``address`` is where it listens. In a ``with`` block it is ended at the end."""

    def __init__(self, folder: Path, *options: str, tcp: bool = False, port: int = 0) -> None:
        self.folder = folder
        self._command = [sys.executable, "-m", "kvcomm.cli", "anchors", "serve", "--dir", str(folder), *options]
        self._command += ["--host", "127.0.0.1", "--port", str(port)] if tcp else []
        self._tcp = tcp
        self.start()

    def start(self) -> None:
        """Start it, again if it was ended; over TCP it keeps its port."""
        command = list(self._command)
        if self._tcp and hasattr(self, "address"):
            command[-1] = self.address.rpartition(":")[2]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            assert self.process.stderr is not None
            raise AssertionError(f"the service did not start: {line}{self.process.stderr.read()}")
        self.address = line.removeprefix("listening on ").strip()

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
