"""The anchor service: a thread that accepts, and one for each connection."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvcomm.errors import KVCommError, Overloaded
from kvcomm.serve.conversation import HELLO_S, Conversation
from kvcomm.store.base import Deadline
from kvcomm.transfer.frame import Kind
from kvcomm.transfer.refusal import refusal
from kvcomm.transfer.wire import Wire, server_wire

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 512


class Server:
    """Conversation listening sockets until ``stop``. The sockets are the server's from then on.

    Args:
        session: makes what serves a connection.

    Why threads: blocking copies let go of the interpreter's lock, so bytes move as fast as on a bare socket, and the
    store's calls, which block, need no second pool. What there is at most is ``max_connections``.
    """

    def __init__(
        self, session: Callable[[Wire], Conversation], listeners: Sequence[socket.socket], *,
        tls: ssl.SSLContext | None = None, max_connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        self._session, self._listeners, self._tls = session, list(listeners), tls
        self._max = max_connections
        self._sessions: dict[Conversation, threading.Thread] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._accepting: list[threading.Thread] = []
        self._leaving: deque[socket.socket] = deque()
        self._open = self.turned_away = 0

    def start(self) -> None:
        """Begin to accept; returns at once."""
        for listener in self._listeners:
            listener.settimeout(0.5)
            thread = threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True)
            self._accepting.append(thread)
            thread.start()

    def stop(self, grace_s: float = 5.0) -> None:
        """Accept no more, let calls that run end for at most ``grace_s`` seconds, close everything."""
        deadline = Deadline(grace_s)
        self._stopping.set()
        for thread in self._accepting:
            thread.join()
        for listener in self._listeners:
            listener.close()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.stop()
        for thread in sessions.values():
            thread.join(deadline.left())
        for session in sessions:
            session.stop(now=True)
        for thread in sessions.values():
            thread.join(1.0)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        with self._lock:
            return self._open

    @property
    def leases(self) -> int:
        """Entries that clients have pinned."""
        with self._lock:
            return sum(session.leases for session in self._sessions)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                with self._lock:
                    self._leaving.clear()
                continue
            except OSError as error:
                log.warning("accepting failed: %s", error)
                self._stopping.wait(0.05)
                continue
            with self._lock:
                full = self._open >= self._max
                self._open += not full
            if full:
                self._turn_away(sock)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="session", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                with self._lock:
                    self._open -= 1
                self._turn_away(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            session = self._session(server_wire(sock, self._tls, Deadline(HELLO_S)))
            with self._lock:
                self._sessions[session] = threading.current_thread()
            if self._stopping.is_set():
                session.stop()
            session.run()
            with self._lock:
                del self._sessions[session]
        except (OSError, KVCommError) as error:
            log.info("a connection was not made: %s", error)
            sock.close()
        finally:
            with self._lock:
                self._open -= 1

    def _turn_away(self, sock: socket.socket) -> None:
        """Say why, and close only later: closed at once, with the client's hello unread, TCP would lose the words."""
        self.turned_away += 1
        try:
            error = Overloaded(f"{self._max} connections are open, the limit; try again after a pause")
            if self._tls is None:
                Wire(sock).send(Kind.REFUSAL, 0, refusal(error), Deadline(0.01))
                sock.shutdown(socket.SHUT_WR)
        except (OSError, KVCommError):
            pass
        with self._lock:
            self._leaving.append(sock)
            while len(self._leaving) > 64:
                self._leaving.popleft().close()
