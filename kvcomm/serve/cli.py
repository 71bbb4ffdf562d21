"""``kvcomm anchors serve``: one command that runs the service until a signal ends it."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.serve.token_cli import AUDIT_NAME, TOKENS_NAME
from kvcomm.serve.token_cli import app as token_app

if TYPE_CHECKING:
    from kvcomm.transfer.auth import Grant

app = typer.Typer(help="Share KV and what was learned among processes and machines.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Share KV and what was learned among processes and machines."""


app.add_typer(token_app, name="token")


@app.command()
def serve(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of all that is kept; made if it is not there.")],
    max_bytes: Annotated[int, typer.Option(help="Bytes of entries, all namespaces together.", min=1 << 20)] = 10 << 30,
    socket_path: Annotated[Path | None, typer.Option("--socket", help="Unix socket, made with mode 0600.")] = None,
    host: Annotated[str | None, typer.Option(help="TCP host; beyond loopback with TLS and tokens only.")] = None,
    port: Annotated[int, typer.Option(help="TCP port, 0 for any free one.", min=0, max=65535)] = 0,
    certificate: Annotated[Path | None, typer.Option(help="PEM file of the certificate, for TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    namespace_bytes: Annotated[int | None, typer.Option(help="Bytes of one namespace.", min=1 << 16)] = None,
    upload_bytes: Annotated[int, typer.Option(help="Memory for values on their way in.", min=4 << 20)] = 1 << 30,
    max_connections: Annotated[int, typer.Option(help="Connections at once.", min=1, max=4096)] = 512,
    slots: Annotated[int, typer.Option(help="Calls at work at once.", min=1, max=1024)] = 16,
    durable: Annotated[bool, typer.Option(help="fsync what is acknowledged.")] = True,
    status_port: Annotated[int | None, typer.Option(help="Port on loopback of page, /metrics and /health.")] = None,
    verbose: Annotated[bool, typer.Option(help="Log every call.")] = False,
) -> None:
    """Run the anchor service. By default it listens on a Unix socket in its folder.

    Where the folder has tokens (``kvcomm anchors token create``), every connection must show one; else whoever may
    connect is believed his namespace. Prints ``listening on ADDRESS`` for each socket when it is ready. SIGTERM ends it
    after the calls that run.
    """
    from kvcomm import __version__
    from kvcomm.errors import InvalidInput, KVCommError
    from kvcomm.serve.audit import AuditLog, Denials
    from kvcomm.serve.log import to_stderr
    from kvcomm.serve.service import Service, Settings, address_of, local_door
    from kvcomm.serve.tokens import TokenFile
    from kvcomm.serve.web import StatusServer
    from kvcomm.store.eviction import UNLIMITED
    from kvcomm.transfer.bind import listen_tcp, listen_unix
    from kvcomm.transfer.tls import server_context

    to_stderr(verbose)
    ended = threading.Event()
    signals: list[int] = []

    def end(number: int, frame: object) -> None:
        signals.append(number)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        if (certificate is None) != (key is None):
            raise InvalidInput("a certificate needs its key and the other way round; pass both or neither")
        tls = None if certificate is None or key is None else server_context(certificate, key)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tokens = TokenFile(folder / TOKENS_NAME) if (folder / TOKENS_NAME).exists() else None
        listeners = [] if host is None else [listen_tcp(host, port, tls=tls, tokens=tokens is not None)]
        path = socket_path or (folder / "anchors.sock" if host is None else None)
        if path is not None:
            if tls is not None:
                raise InvalidInput("TLS belongs to TCP; leave --socket or --certificate out")
            listeners.append(listen_unix(path.absolute()))
        settings = Settings(
            folder, max_bytes, namespace_bytes or UNLIMITED, upload_bytes, max_connections, slots, durable
        )  # fmt: skip
        authenticate, holds = (local_door, _always) if tokens is None else (tokens.authenticate, tokens.holds)
        audit = AuditLog(folder / AUDIT_NAME)
        service = Service(
            settings, listeners, authenticate, tls=tls, holds=holds, on_admin=audit.admin, on_denied=Denials(audit)
        )
        service.start()
        audit.write("service_start", "local", version=__version__)
        web = None
        if status_port is not None:
            check = None if tokens is None else tokens.check
            web = StatusServer(service.snapshot, service.health, port=status_port, check=check).start()
    except KVCommError as error:
        print(f"kvcomm anchors: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    for listener in listeners:
        print(f"listening on {address_of(listener)}", flush=True)
    if web is not None:
        print(f"status page on http://{web.address[0]}:{web.address[1]}/", flush=True)
    while not ended.wait(3600.0):
        pass
    if web is not None:
        web.stop()
    service.stop()
    with suppress(KVCommError):
        audit.write("service_stop", "local", signal=signal.Signals(signals[0]).name)
    if path is not None:
        path.unlink(missing_ok=True)


def _always(grant: Grant) -> bool:
    return True
