"""Where a service is: ``unix:/path`` or ``host:port``, and how to connect to it before a deadline."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.wire import TlsWire, Wire


@dataclass(frozen=True)
class Address:
    """A Unix socket's path, or a host and port.

    Raises:
        InvalidInput: neither or both are given.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.host) or (self.host and not 1 <= self.port <= 65535):
            raise InvalidInput(f"{self.path!r} {self.host!r}:{self.port} is no address; pass unix:/path or host:port")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``unix:/path``, ``host:port`` or ``[v6]:port``. Raises InvalidInput."""
        if text.startswith("unix:"):
            return cls(path=os.path.expanduser(text.removeprefix("unix:")))
        host, _, port = text.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or len(port) > 5:
            raise InvalidInput(f"{text[:100]!r} is no address; pass unix:/path or host:port")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    def connect(self, deadline: Deadline, tls: ssl.SSLContext | None = None) -> Wire:
        """A new connection. Raises StoreUnavailable, DeadlineExceeded among them."""
        try:
            family = socket.AF_UNIX if self.path else socket.AF_INET6 if ":" in self.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(deadline.left(), 0.001))
                sock.connect(self.path if self.path else (self.host, self.port))
                return Wire(sock) if tls is None else TlsWire(tls.wrap_socket(sock, server_hostname=self.host or None))
            except BaseException:
                sock.close()
                raise
        except TimeoutError:
            raise deadline.error(f"connecting to {self}") from None
        except OSError as error:
            raise StoreUnavailable(f"no service answers at {self} ({error}); is it running?") from None

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"
