"""``/``, ``/metrics`` and ``/health`` over HTTP: GET only, and for this machine only unless TLS and tokens are set."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Self

from kvcomm.errors import AccessDenied, KVCommError
from kvcomm.serve.metrics import Metrics
from kvcomm.serve.status import Snapshot, page
from kvcomm.transfer.auth import ADMIN, Grant, Token
from kvcomm.transfer.bind import check_bind, is_loopback, is_loopback_address, listen_tcp

ROUTES = ("/", "/metrics", "/health")
MAX_CONNECTIONS = 16
TIMEOUT_S = 10.0
_HTML = "text/html; charset=utf-8"


class StatusServer:
    """Serves the status page from threads of its own, at most 16 at once.

    Args:
        snapshot: the service's present state; may be called from any thread.
        health: puts and gets a probe and returns whether that went well; may raise KVCommError.
        check: what a token grants (TokenFile.check). Where it is given, each request needs the right ``admin``, as
            ``Authorization: Bearer kvc_...``; only on loopback may it be left out.
        tls: needed off loopback.

    Raises:
        InvalidInput: the bind rule refuses the address, or it cannot be bound.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        health: Callable[[], bool],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        check: Callable[[Token], Grant] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        check_bind(host, port, tls=tls, tokens=check is not None)
        self.snapshot, self.health, self.check = snapshot, health, check
        self.local = is_loopback(host)
        self._server = _Server(self, listen_tcp(host, port, tls=tls, tokens=check is not None), tls)
        self.address: tuple[str, int] = self._server.socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvcomm-status", daemon=True)

    def start(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for one of ROUTES."""
        if path == "/health":
            try:
                good = self.health()
            except KVCommError:
                good = False
            status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", json.dumps({"healthy": good}).encode() + b"\n"
        if path == "/metrics":
            return HTTPStatus.OK, *Metrics(self.snapshot).render()
        return HTTPStatus.OK, _HTML, page(self.snapshot()).encode()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: StatusServer, listener: Any, tls: ssl.SSLContext | None) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.owner, self._tls = listener, owner, tls
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(TIMEOUT_S)
            if self._tls is not None:  # here and not where connections are accepted: a slow client holds up itself only
                request = self._tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that goes away is no event, and a traceback would show its data."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def version_string(self) -> str:
        """Who answers, without versions of anything."""
        return "kvcomm"

    def do_GET(self) -> None:
        owner = self.server.owner
        path = self.path.partition("?")[0]
        if owner.local and not _names_this_machine(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"ask for 127.0.0.1 or localhost\n")
        elif owner.check is not None and not self._admitted(owner.check):
            self._send(HTTPStatus.UNAUTHORIZED, "text/plain", b"a token with the right admin is needed\n")
        elif path not in ROUTES:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there are /, /metrics and /health\n")
        else:
            try:
                self._send(*owner.answer(path))
            except KVCommError as error:
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    def _admitted(self, check: Callable[[Token], Grant]) -> bool:
        scheme, _, text = self.headers.get("Authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer":
                return False
            check(Token.parse(text.strip())).need(ADMIN)
        except AccessDenied:
            return False
        return True

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
            ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
        ):  # fmt: skip
            self.send_header(name, value)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: requests are counted by who serves them, and their text is a stranger's."""


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is a loopback address; a page elsewhere whose name leads here sends its own name."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name == "localhost" or is_loopback_address(name)
