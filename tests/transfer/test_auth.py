"""Tokens as clients hold them, the bind rule, and TLS on 127.0.0.1."""

import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvcomm.errors import AccessDenied, InvalidInput
from kvcomm.transfer.auth import ADMIN, READ, WRITE, Grant, Token, local_grant, read_token
from kvcomm.transfer.bind import check_bind, is_loopback, listen_tcp, listen_unix
from kvcomm.transfer.tls import client_context, server_context
from tests.transfer.certificates import make

GOOD = "kvc_" + "0a" * 8 + "_" + "s" * 43


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvc_",
        GOOD[:-1],
        GOOD + "s",
        GOOD + "\n",
        GOOD.upper(),
        "kvc_" + "0a" * 8 + "_" + "ß" * 43,
        "Bearer " + GOOD,
    ],
)
def test_what_is_no_token_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(AccessDenied) as error:
        Token.parse(text)
    assert text.strip() == "" or text not in str(error.value)


def test_a_token_hides_its_secret() -> None:
    token = Token.parse(GOOD)
    assert token.reveal() == GOOD
    assert "sss" not in repr(token) + str(token) + f"{token}"


def test_token_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(GOOD + "\n")
    file.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        read_token(file, {})
    file.chmod(0o600)
    assert read_token(file, {}) == Token.parse(GOOD)
    assert read_token(None, {"KVCOMM_TOKEN": GOOD}) == Token.parse(GOOD)
    assert read_token(None, {}) is None
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_token(tmp_path / "absent", {"KVCOMM_TOKEN": GOOD})
    file.write_bytes(b"x" * 5000)
    with pytest.raises(InvalidInput, match="exceeds 4096"):
        read_token(file, {})
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InvalidInput, match="regular file"):
        read_token(tmp_path / "fifo", {})


def test_rights_are_separate() -> None:
    for right in (READ, WRITE, ADMIN):
        grant = Grant("one", frozenset({right}))
        grant.need(right)
        for other in {READ, WRITE, ADMIN} - {right}:
            with pytest.raises(AccessDenied, match=other):
                grant.need(other)
    for rights in (frozenset[str](), frozenset({"root"}), frozenset({READ, "root"})):
        with pytest.raises(InvalidInput):
            Grant("one", rights)
    with pytest.raises(InvalidInput):
        local_grant("../other")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, 0, tls=None, tokens=False)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "192.0.2.7", "no such host"])
def test_any_other_bind_needs_tls_and_tokens(host: str, tmp_path: Path) -> None:
    context = server_context(*make(tmp_path))
    for tls, tokens, lacks in ((None, False, "TLS and tokens"), (None, True, "TLS is"), (context, False, "tokens are")):
        with pytest.raises(InvalidInput, match=lacks) as error:
            listen_tcp(host, 0, tls=tls, tokens=tokens)
        assert "127.0.0.1" in str(error.value)
    check_bind(host, 0, tls=context, tokens=True)


def test_rule_holds_under_python_o() -> None:
    code = (
        "from kvcomm.transfer.bind import listen_tcp\nfrom kvcomm.errors import InvalidInput\n"
        "try:\n listen_tcp('0.0.0.0', 0, tls=None, tokens=False)\nexcept InvalidInput: print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "refused"


def test_unix_socket_is_private_and_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    old = os.umask(0)
    try:
        listener = listen_unix(path)
    finally:
        os.umask(old)
    with listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InvalidInput, match="answers"):
            listen_unix(path)
    listen_unix(path).close()  # what a dead service left is replaced
    path.unlink()
    path.write_text("mine")
    with pytest.raises(InvalidInput, match="no socket"):
        listen_unix(path)
    assert path.read_text() == "mine"
    with pytest.raises(InvalidInput, match="107"):
        listen_unix(tmp_path / ("x" * 120))
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidInput, match="go-w"):
        listen_unix(tmp_path / "other.sock")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "127.0.0.1") -> str | None:
    """TLS version agreed on by the two, with one byte sent each way; errors of the client are raised."""
    listener = listen_tcp("127.0.0.1", 0, tls=server, tokens=True)

    def serve() -> None:
        try:
            connection, _ = listener.accept()
            connection.settimeout(10)
            with server.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(secured.recv(1))
        except OSError:
            pass  # the client says what went wrong

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=10) as plain:
            with client.wrap_socket(plain, server_hostname=name) as secured:
                secured.sendall(b"k")
                if secured.recv(1) != b"k":
                    raise ConnectionResetError("closed without an answer")
                return secured.version()
    finally:
        thread.join(15)
        listener.close()


def test_tls_handshake(tmp_path: Path) -> None:
    certificate, key = make(tmp_path / "service")
    assert handshake(server_context(certificate, key), client_context(certificate)) == "TLSv1.3"


def test_client_verifies_authority_name_and_time(tmp_path: Path) -> None:
    certificate, key = make(tmp_path / "service")
    stranger, _ = make(tmp_path / "stranger")
    server = server_context(certificate, key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_context(stranger))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_context())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_context(certificate), name="127.0.0.2")
    late, late_key = make(tmp_path / "late", days=-1)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(late, late_key), client_context(late))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
def test_old_tls_is_refused(tmp_path: Path) -> None:
    certificate, key = make(tmp_path)
    server, client = server_context(certificate, key), client_context(certificate)
    assert server.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_2
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(server, client)


def test_client_certificate_where_the_service_asks(tmp_path: Path) -> None:
    certificate, key = make(tmp_path / "service")
    mine, my_key = make(tmp_path / "client")
    server = server_context(certificate, key, client_authority=mine)
    assert handshake(server, client_context(certificate, mine, my_key)) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        handshake(server, client_context(certificate))


def test_wrong_tls_files_are_named(tmp_path: Path) -> None:
    certificate, key = make(tmp_path / "one")
    _, other_key = make(tmp_path / "two")
    with pytest.raises(InvalidInput, match="cannot be used"):
        server_context(certificate, other_key)
    with pytest.raises(InvalidInput, match="cannot be used"):
        client_context(tmp_path / "absent.pem")
    with pytest.raises(InvalidInput, match="needs its key"):
        client_context(certificate, certificate)
    key.chmod(0o640)
    with pytest.raises(InvalidInput, match="chmod 600"):
        server_context(certificate, key)
