"""Where a service may listen: loopback or a private Unix socket; anywhere else only with TLS and tokens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from kvcomm.errors import InvalidInput

MAX_SOCKET_PATH_BYTES = 107
BACKLOG = 512


def is_loopback(host: str) -> bool:
    """Whether a bind to ``host`` is reachable from this machine only. A name counts if all its addresses do."""
    if is_loopback_address(host):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    return bool(found) and all(map(is_loopback_address, found))


def is_loopback_address(text: str) -> bool:
    """Whether ``text`` is a loopback address in figures; no name is ever looked up."""
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def check_bind(host: str, port: int, *, tls: ssl.SSLContext | None, tokens: bool) -> None:
    """Raise InvalidInput unless the service may listen on TCP ``host``:``port``.

    Args:
        tls: the service's context, or None for plain TCP.
        tokens: whether every connection must show a token.
    """
    if not 0 <= port <= 65535:
        raise InvalidInput(f"port {port} is outside 0 to 65535; choose one within, 0 for any free one")
    if is_loopback(host) or (tls is not None and tokens):
        return
    lacks = " and ".join(n for n, there in (("TLS", tls is not None), ("tokens", tokens)) if not there)
    raise InvalidInput(
        f"{host or 'every interface'}:{port} can be reached from other machines, and {lacks} "
        f"{'are' if ' and ' in lacks or lacks == 'tokens' else 'is'} not set; pass certificate, key and token file, "
        "or listen on 127.0.0.1 or a Unix socket"
    )


def listen_tcp(host: str, port: int, *, tls: ssl.SSLContext | None, tokens: bool) -> socket.socket:
    """A listening socket, made only if ``check_bind`` agrees; the caller wraps connections in ``tls``.

    Raises:
        InvalidInput: the rule refuses, or the address cannot be bound.
    """
    check_bind(host, port, tls=tls, tokens=tokens)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(f"cannot listen on {host}:{port} ({error.strerror}); choose another port") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket of mode 0600. A left-over one that nobody answers is replaced.

    Raises:
        InvalidInput: a service answers there, the path is no socket or too long, others could replace it in its
            folder, or it cannot be made.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidInput(f"socket path {path} exceeds {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.stat(path.parent)
        if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
            raise InvalidInput(f"others may write into {path.parent}, and so replace the socket; run chmod go-w on it")
        _clear(path)
        os.fchmod(listener.fileno(), 0o600)  # the mode that bind gives the file, so that there is no moment between
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidInput(f"cannot listen on {path} ({error.strerror}); check folder and permissions") from None
    except BaseException:
        listener.close()
        raise
    return listener


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on. Raises InvalidInput where there is anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidInput(f"{path} is there and no socket; choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        raise InvalidInput(f"a service answers on {path} already; stop it, or choose another path")
    os.unlink(path)
