"""A service in this process, for tests that look inside; and a proxy that cuts, delays and swallows what it passes."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcomm.serve import session
from kvcomm.serve.call import Call
from kvcomm.serve.service import Service, Settings, local_door
from kvcomm.transfer.address import Address
from kvcomm.transfer.bind import listen_unix

ROOM = 64 << 20


@contextmanager
def service_here(folder: Path, **settings: Any) -> Iterator[tuple[Service, str]]:
    """A started service and its address."""
    path = folder / "s.sock"
    options: dict[str, Any] = {"upload_bytes": ROOM, "durable": False, **settings}
    service = Service(Settings(folder / "kept", ROOM, **options), [listen_unix(path)], local_door)
    service.start()
    try:
        yield service, f"unix:{path}"
    finally:
        service.stop(1.0)


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls that services in this process are asked, by name, each counted before it is answered."""
    calls: Counter[str] = Counter()

    def counted(name: str, run: Callable[[Call], None]) -> Callable[[Call], None]:
        def counting(call: Call) -> None:
            calls[name] += 1
            run(call)

        return counting

    for name, known in session.CALLS.items():
        monkeypatch.setitem(session.CALLS, name, replace(known, run=counted(name, known.run)))
    return calls


Pass = Callable[[bytes, int], bytes]
"""(a piece, bytes passed before it) -> what is passed on instead; if it is shorter, both sides are closed then."""


class Proxy:
    """Passes bytes between clients and a service; ``answers`` and ``requests`` may change them, or hold them back."""

    def __init__(self, folder: Path, address: str) -> None:
        self.requests: Pass = lambda data, at: data
        self.answers: Pass = lambda data, at: data
        self.black_hole = self.drip = False
        self.connections = 0
        self._target = Address.parse(address)
        self._listener = listen_unix(folder / "p.sock")
        self.address = f"unix:{folder / 'p.sock'}"
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End it, and all connections."""
        for sock in [self._listener, *self._socks]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.connect(self._target.path)
            except OSError:
                client.close()
                continue
            self._socks += [client, server]
            for source, sink, name in ((client, server, "requests"), (server, client, "answers")):
                threading.Thread(target=self._pump, args=(source, sink, name), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        at = 0
        try:
            while data := source.recv(65536):
                while self.black_hole:
                    time.sleep(0.01)
                changed = getattr(self, name)(data, at)
                at += len(data)
                for piece in [changed[n : n + 1] for n in range(len(changed))] if self.drip else [changed]:
                    time.sleep(1.0 if self.drip else 0.0)
                    sink.sendall(piece)
                if len(changed) < len(data):
                    break
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@contextmanager
def proxied(folder: Path, **settings: Any) -> Iterator[tuple[Service, Proxy]]:
    """A service behind a proxy."""
    with service_here(folder, **settings) as (service, address):
        proxy = Proxy(folder, address)
        try:
            yield service, proxy
        finally:
            proxy.black_hole = False
            proxy.close()


def cut_at(end: int) -> Pass:
    """Passes ``end`` bytes, then closes."""
    return lambda data, at: data[: max(0, end - at)]
