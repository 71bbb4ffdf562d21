"""Connections to Redis on which no wait outlasts the call's deadline, and which are TLS or stay on this machine.

redis-py's timeouts are for one receive or one send; here each of them gets what is left of the whole call, and a server
that drips gains nothing. Imports redis-py: import this module late.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvcomm.errors import InvalidInput
from kvcomm.store.base import Deadline
from kvcomm.transfer.bind import is_loopback

_LEAST_S = 0.001


class Watch(threading.local):
    """The deadline of the call that runs in this thread."""

    deadline: Deadline | None = None

    def left(self) -> float | None:
        """Seconds left, or None outside a call. Raises TimeoutError when none are."""
        if self.deadline is None:
            return None
        left = self.deadline.left()
        if left <= 0:
            raise TimeoutError(f"deadline_s={self.deadline.seconds} has passed")
        return max(left, _LEAST_S)


@dataclass(frozen=True)
class Server:
    """Where Redis is and who asks.

    Attributes:
        address: ``unix:/path`` or ``host:port``.
        username, password: of an ACL user; a password alone is the default user's.
        tls: the client's context, see ``kvcomm.transfer.tls.client_context``. Needed for any host but this one.
        cluster: whether the server is a node of a Redis Cluster, from which the other nodes are found.

    Raises:
        InvalidInput: the address is none, or a host that is not this machine is to be reached without TLS.
    """

    address: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    cluster: bool = False

    def __post_init__(self) -> None:
        if self.unix_path is not None:
            if not self.unix_path or self.tls is not None or self.cluster:
                raise InvalidInput(f"address {self.address!r} needs a path, and neither TLS nor a cluster")
        elif self.tls is None and not is_loopback(self.host_port[0]):
            raise InvalidInput(f"{self.address} is not this machine; pass tls=client_context(...) to reach it")

    @property
    def unix_path(self) -> str | None:
        """Path of the Unix socket, or None."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    @property
    def host_port(self) -> tuple[str, int]:
        """Host and port of a TCP address."""
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidInput(f"address {self.address[:80]!r} is neither unix:/path nor host:port; give one of them")
        return host.strip("[]"), int(port)


def connect(server: Server, watch: Watch) -> Any:
    """A redis-py client. A plain one connects at its first call; one of a cluster asks the node for the others now."""
    never = Retry(NoBackoff(), 0)  # the caller retries: it knows what may be repeated, and until when
    common: dict[str, Any] = {
        "username": server.username, "password": server.password, "retry": never, "protocol": 2,
        "connection_class": _connection_class(server, watch),
    }  # fmt: skip
    if server.unix_path is not None:
        return redis.Redis(connection_pool=redis.ConnectionPool(path=server.unix_path, **common))
    host, port = server.host_port
    if server.cluster:
        bracketed = f"[{host}]" if ":" in host else host
        # Only by a URL does each node's pool get the connection class.
        return redis.cluster.RedisCluster(url=f"redis://{bracketed}:{port}", **common)
    return redis.Redis(connection_pool=redis.ConnectionPool(host=host, port=port, **common))


def _connection_class(server: Server, watch: Watch) -> type[Any]:
    base: Any = redis.Connection if server.unix_path is None else redis.UnixDomainSocketConnection

    class WatchedConnection(base):  # type: ignore[misc]
        def _connect(self) -> BoundedSocket:
            left = watch.left()
            self.socket_connect_timeout = left
            sock = super()._connect()
            if server.tls is not None:
                try:
                    sock.settimeout(left)
                    sock = server.tls.wrap_socket(sock, server_hostname=self.host)
                except BaseException:
                    sock.close()
                    raise
            return BoundedSocket(sock, watch)

    return WatchedConnection


class BoundedSocket:
    """A socket whose sends and receives end at the running call's deadline, or before, where redis-py asks for less."""

    def __init__(self, sock: Any, watch: Watch) -> None:
        self._socket, self._watch = sock, watch
        self._asked: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        """What redis-py asks for; the deadline is added at each use."""
        self._asked = seconds

    def recv(self, size: int) -> bytes:
        """As of a socket."""
        self._arm()
        return bytes(self._socket.recv(size))

    def recv_into(self, buffer: memoryview, *rest: int) -> int:
        """As of a socket."""
        self._arm()
        return int(self._socket.recv_into(buffer, *rest))

    def sendall(self, data: bytes | memoryview) -> None:
        """As of a socket; its timeout is for all of ``data``."""
        self._arm()
        self._socket.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _arm(self) -> None:
        if self._asked == 0:  # redis-py looks whether something has come; that waits for nothing
            self._socket.settimeout(0)
            return
        left = self._watch.left()
        known = [t for t in (left, self._asked) if t is not None]
        self._socket.settimeout(min(known, default=None))
