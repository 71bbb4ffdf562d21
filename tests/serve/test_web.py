"""The status server: loopback by default, GET only, three routes, an admin token elsewhere."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.errors import AccessDenied, InvalidInput, StoreUnavailable
from kvcomm.serve.web import MAX_CONNECTIONS, StatusServer
from kvcomm.transfer.auth import Grant, Token
from kvcomm.transfer.tls import client_context, server_context
from tests.serve.states import full
from tests.transfer.certificates import make

ADMIN_TOKEN = "kvc_" + "a" * 16 + "_" + "s" * 43
READ_TOKEN = "kvc_" + "b" * 16 + "_" + "s" * 43


def check(token: Token) -> Grant:
    if token.reveal() == ADMIN_TOKEN:
        return Grant("one", frozenset({"admin"}))
    if token.reveal() == READ_TOKEN:
        return Grant("one", frozenset({"read", "write"}))
    raise AccessDenied("the token is not accepted")


@pytest.fixture
def server() -> Iterator[StatusServer]:
    running = StatusServer(full, lambda: True).start()
    yield running
    running.stop()


def ask(
    server: StatusServer, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: str | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_routes(server: StatusServer) -> None:
    status, text, headers = ask(server, "/")
    assert status == 200 and "kvcomm anchor service" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Server"] == "kvcomm"
    assert ask(server, "/metrics")[1].startswith("# HELP kvcomm_hits_total")
    assert json.loads(ask(server, "/health")[1]) == {"healthy": True}
    for path in ("/x", "//x", "/../etc/passwd", "/debug", "/metrics/", "/%00"):
        assert ask(server, path)[0] == 404


def test_only_loopback_listens(server: StatusServer) -> None:
    listening = {
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    assert f"0100007F:{server.address[1]:04X}" in listening
    assert f"00000000:{server.address[1]:04X}" not in listening


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_get_only(server: StatusServer, method: str) -> None:
    assert ask(server, "/", method, body="x" if method == "POST" else None)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.nip.io", "a.b.c.d", "10.0.0.1", ""])
def test_a_name_that_leads_here_is_refused(server: StatusServer, host: str) -> None:
    assert ask(server, "/", headers={"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:80", "[::1]:80"])
def test_own_names_are_not(server: StatusServer, host: str) -> None:
    assert ask(server, "/", headers={"Host": host})[0] == 200


def test_health_says_what_the_probe_found() -> None:
    def broken() -> bool:
        raise StoreUnavailable("the disk is full of a prompt's text")

    for probe in (broken, lambda: False):
        server = StatusServer(full, probe).start()
        try:
            status, text, _ = ask(server, "/health")
            assert status == 503 and json.loads(text) == {"healthy": False}
        finally:
            server.stop()


def test_elsewhere_only_with_tls_and_tokens(tmp_path: Path) -> None:
    context = server_context(*make(tmp_path))
    for given in ({}, {"check": check}, {"tls": context}):
        with pytest.raises(InvalidInput, match="other machines"):
            StatusServer(full, lambda: True, host="0.0.0.0", **given)


def test_admin_token_where_tokens_are_set(tmp_path: Path) -> None:
    certificate, key = make(tmp_path)
    server = StatusServer(full, lambda: True, check=check, tls=server_context(certificate, key)).start()
    try:
        for header, expected in (
            (f"Bearer {ADMIN_TOKEN}", 200), (f"bearer {ADMIN_TOKEN}", 200), (f"Bearer {READ_TOKEN}", 401),
            ("Bearer x", 401), (f"Basic {ADMIN_TOKEN}", 401), ("", 401),
        ):  # fmt: skip
            secured = http.client.HTTPSConnection(*server.address, timeout=30, context=client_context(certificate))
            for path in ("/", "/metrics", "/health"):
                secured.request("GET", path, headers={"Authorization": header})
                answer = secured.getresponse()
                text = answer.read().decode()
                assert answer.status == expected and ("kvcomm_" in text or expected == 401 or path != "/metrics")
                secured.close()
        with pytest.raises((OSError, http.client.HTTPException, ssl.SSLError)):
            ask(server, "/")  # plain HTTP is not answered
    finally:
        server.stop()


def test_connections_are_bounded_and_freed(server: StatusServer) -> None:
    idle = [socket.create_connection(server.address, timeout=30) for _ in range(MAX_CONNECTIONS)]
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            for _ in range(50):  # the last of the idle ones may not be counted yet
                ask(server, "/")
            pytest.fail("more connections than the limit were served")
    finally:
        for connection in idle:
            connection.close()
    for _ in range(100):
        try:
            assert ask(server, "/")[0] == 200
            return
        except (OSError, http.client.HTTPException):
            continue
    pytest.fail("no connection was freed")


def test_rubbish_gets_an_error_and_no_traceback(server: StatusServer, capfd: pytest.CaptureFixture[str]) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET " + b"/" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(server.address, timeout=30) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            try:
                while raw.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    assert ask(server, "/health")[0] == 200
    assert capfd.readouterr() == ("", "")
