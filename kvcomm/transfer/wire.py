"""Frames over a connected socket: sent from where they lie, received to where they belong, never past a deadline."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvcomm.errors import ProtocolError, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.frame import PREAMBLE_BYTES, Kind, Preamble, open_header, pack, payload_check, unpack

_BUFFERS = 512  # sendmsg and recvmsg_into take at most 1,024
_SOCKET_BYTES = 4 << 20
_TLS_BYTES = 1 << 16


class Wire:
    """One end of a connection. One thread at a time receives; another may send.

    Every method raises DeadlineExceeded at the deadline, StoreUnavailable if the connection ends or fails, and
    ProtocolError if the other side sends what is no frame. After any of them the connection cannot be used any more.
    """

    _direct = hasattr(os, "sendfile")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = self.received = 0
        sock.settimeout(0)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start = bytearray(PREAMBLE_BYTES)
        self._poll_in, self._poll_out = select.poll(), select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._poll_out.register(sock, select.POLLOUT)

    def send(
        self, kind: Kind, number: int, header: Mapping[str, object] | None, deadline: Deadline,
        payload: Sequence[memoryview] = (), *, checked: bool = True, waits: bool = False,
    ) -> None:  # fmt: skip
        """Send a frame whose payload is ``payload``'s buffers, none of them copied.

        Args:
            checked: send a checksum of the payload.
            waits: tell the other side how much of the deadline is left.
        """
        left_ms = max(1, int(deadline.left() * 1000)) if waits else 0
        self.send_all([memoryview(pack(kind, number, header, payload, deadline_ms=left_ms, checked=checked)), *payload],
                      deadline)  # fmt: skip

    def send_all(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Send bytes as they lie."""
        left = [b for b in buffers if len(b)]
        at = 0
        with _fails("sending"):
            while at < len(left):
                try:
                    done = self._sendmsg(left[at : at + _BUFFERS])
                except (BlockingIOError, InterruptedError):
                    self._wait(self._poll_out, deadline, "sending")
                    continue
                self.sent += done
                while at < len(left) and done >= len(left[at]):
                    done -= len(left[at])
                    at += 1
                if done:
                    left[at] = left[at][done:]

    def send_file(self, head: bytes, fd: int, offset: int, nbytes: int, deadline: Deadline) -> None:
        """Send ``head``, then bytes of an open file straight from the page cache.

        Raises:
            StoreUnavailable: also if the file is shorter than asked for.
        """
        self.send_all([memoryview(head)], deadline)
        if not self._direct:
            self._send_read(fd, offset, nbytes, deadline)
            return
        with _fails("sending a file"):
            while nbytes:
                try:
                    done = os.sendfile(self._sock.fileno(), fd, offset, nbytes)
                except (BlockingIOError, InterruptedError):
                    self._wait(self._poll_out, deadline, "sending")
                    continue
                if not done:
                    raise StoreUnavailable(f"the file ends {nbytes} bytes early; the connection is closed")
                self.sent += done
                offset, nbytes = offset + done, nbytes - done

    def receive(self, deadline: Deadline) -> tuple[Preamble, dict[str, object]]:
        """The next frame's preamble and header; its payload must be received before the next frame."""
        self.fill([memoryview(self._start)], deadline)
        preamble = unpack(self._start)
        header = bytearray(preamble.header_bytes)
        self.fill([memoryview(header)], deadline)
        return preamble, open_header(self._start, header)

    def payload(self, preamble: Preamble, deadline: Deadline) -> bytearray:
        """A whole payload in fresh memory, checked."""
        data = bytearray(preamble.payload_bytes)
        self.payload_into(preamble, memoryview(data), deadline)
        return data

    def payload_into(self, preamble: Preamble, out: memoryview, deadline: Deadline) -> None:
        """A whole payload into ``out``, which has just its length, checked."""
        self.fill([out], deadline)
        if preamble.checked and payload_check([out]) != preamble.check:
            raise ProtocolError(f"a payload of {len(out)} bytes fails its checksum; the connection is closed")

    def fill(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Receive until all buffers are full."""
        for buffer in buffers:
            at, end = 0, len(buffer)
            while at < end:
                at += self.fill_some(buffer[at:], deadline)
                if at < end and not deadline.left():  # one byte at a time would never make anybody wait
                    raise deadline.error("receiving from the other side")

    def idle(self, seconds: float) -> bool:
        """Wait for the next frame's first byte, or the connection's end; whether there is any."""
        return bool(self._poll_in.poll(seconds * 1000))

    def leave(self, deadline: Deadline) -> None:
        """End sending, and read past up to 1 MiB of what still comes: closed at once, the last words could be lost."""
        with _fails("leaving"):
            self._sock.shutdown(socket.SHUT_WR)
            room = memoryview(bytearray(1 << 16))
            for _ in range(16):
                self.fill_some(room, deadline)

    def fill_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Receive at least one byte; how many."""
        with _fails("receiving"):
            while True:
                try:
                    done = self._recv_into(buffer)
                except (BlockingIOError, InterruptedError):
                    self._wait(self._poll_in, deadline, "receiving")
                    continue
                if not done:
                    raise StoreUnavailable("the other side closed the connection; connect again")
                self.received += done
                return done

    def close(self) -> None:
        """Close; never raises."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def _recv_into(self, buffer: memoryview) -> int:
        return self._sock.recv_into(buffer)

    def _sendmsg(self, buffers: Sequence[memoryview]) -> int:
        return self._sock.sendmsg(buffers)

    def _send_read(self, fd: int, offset: int, nbytes: int, deadline: Deadline) -> None:
        while nbytes:
            data = os.pread(fd, min(nbytes, 1 << 20), offset)
            if not data:
                raise StoreUnavailable(f"the file ends {nbytes} bytes early; the connection is closed")
            self.send_all([memoryview(data)], deadline)
            offset, nbytes = offset + len(data), nbytes - len(data)

    @staticmethod
    def _wait(poll: select.poll, deadline: Deadline, doing: str) -> None:
        left = deadline.left()
        if left <= 0 or not poll.poll(max(1.0, left * 1000)):
            raise deadline.error(f"{doing}: the other side")


class TlsWire(Wire):
    """As Wire, over TLS, which must see and copy all bytes."""

    _direct = False

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock

    def idle(self, seconds: float) -> bool:
        return self._tls.pending() > 0 or super().idle(seconds)

    def _recv_into(self, buffer: memoryview) -> int:
        try:
            return self._tls.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def _sendmsg(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._tls.send(buffers[0][:_TLS_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def server_wire(sock: socket.socket, tls: ssl.SSLContext | None, deadline: Deadline) -> Wire:
    """The service's end of an accepted connection; with ``tls``, after the handshake. Raises StoreUnavailable."""
    if tls is None:
        return Wire(sock)
    with _fails("the TLS handshake"):
        sock.settimeout(max(deadline.left(), 0.001))
        return TlsWire(tls.wrap_socket(sock, server_side=True))


@contextmanager
def _fails(doing: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: closed by another thread
        raise StoreUnavailable(f"{doing} failed ({error}); the connection is closed") from None


def cut(buffers: Sequence[memoryview], start: int, nbytes: int) -> list[memoryview]:
    """``nbytes`` bytes from ``start`` on, of buffers that follow each other, as views."""
    found: list[memoryview] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        if start >= len(buffer):
            start -= len(buffer)
            continue
        found.append(buffer[start : start + nbytes])
        nbytes -= len(found[-1])
        start = 0
    return found
