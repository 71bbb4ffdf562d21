"""Listening sockets: loopback, or a Unix socket of mode 0600."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from kvcomm.errors import InvalidInput


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket that listens on loopback. Raises InvalidInput for any other host, or if it cannot."""
    if host not in ("127.0.0.1", "::1"):
        raise InvalidInput(f"{host} can be reached from other machines; listen on 127.0.0.1 or a Unix socket")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise InvalidInput(f"cannot listen on {host}:{port} ({error.strerror}); choose another port") from None
    return listener


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that listens, mode 0600; a left-over one that nobody answers is replaced. Raises InvalidInput."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(os.lstat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise InvalidInput(f"a service answers on {path} already; stop it, or choose another path")
            path.unlink()
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise InvalidInput(f"cannot listen on {path} ({error.strerror}); check folder and permissions") from None
    except InvalidInput:
        listener.close()
        raise
    return listener
