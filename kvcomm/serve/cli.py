"""``kvcomm anchors serve``: one command that runs the service until a signal ends it."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Share KV and what was learned among processes and machines.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Share KV and what was learned among processes and machines."""


@app.command()
def serve(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of all that is kept; made if it is not there.")],
    max_bytes: Annotated[int, typer.Option(help="Bytes of entries, all namespaces together.", min=1 << 20)] = 10 << 30,
    socket_path: Annotated[Path | None, typer.Option("--socket", help="Unix socket, made with mode 0600.")] = None,
    host: Annotated[str | None, typer.Option(help="TCP host; without tokens only loopback.")] = None,
    port: Annotated[int, typer.Option(help="TCP port, 0 for any free one.", min=0, max=65535)] = 0,
    namespace_bytes: Annotated[int | None, typer.Option(help="Bytes of one namespace.", min=1 << 16)] = None,
    upload_bytes: Annotated[int, typer.Option(help="Memory for values on their way in.", min=4 << 20)] = 1 << 30,
    max_connections: Annotated[int, typer.Option(help="Connections at once.", min=1, max=4096)] = 512,
    durable: Annotated[bool, typer.Option(help="fsync what is acknowledged.")] = True,
    verbose: Annotated[bool, typer.Option(help="Log every call.")] = False,
) -> None:
    """Run the anchor service. By default it listens on a Unix socket in its folder.

    Prints ``listening on ADDRESS`` for each socket when it is ready. SIGTERM ends it after the calls that run.
    """
    from kvcomm.errors import KVCommError
    from kvcomm.serve.bind import listen_tcp, listen_unix
    from kvcomm.serve.log import JsonLines
    from kvcomm.serve.service import Service, Settings, local_door
    from kvcomm.store.eviction import UNLIMITED

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        listeners = []
        if socket_path is not None or host is None:
            listeners.append(listen_unix(socket_path or folder / "anchors.sock"))
        if host is not None:
            listeners.append(listen_tcp(host, port))
        settings = Settings(
            folder, max_bytes, namespace_bytes or UNLIMITED, upload_bytes, max_connections, durable=durable
        )
        service = Service(settings, listeners, local_door)
        names = [_name(listener.getsockname()) for listener in listeners]
        service.start()
    except KVCommError as error:
        print(f"kvcomm anchors: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    for name in names:
        print(f"listening on {name}", flush=True)
    while not ended.wait(3600.0):
        pass
    service.stop()
    if socket_path is not None or host is None:
        (socket_path or folder / "anchors.sock").unlink(missing_ok=True)


def _name(found: object) -> str:
    if isinstance(found, tuple):
        return f"[{found[0]}]:{found[1]}" if ":" in str(found[0]) else f"{found[0]}:{found[1]}"
    return f"unix:{found}"
