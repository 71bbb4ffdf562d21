"""``kvcomm worker``: an engine as a process that prefills for others, decodes what others prefilled, or both."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer


def worker(
    role: Annotated[Literal["prefill", "decode", "both"], typer.Option(help="What it answers.")],
    model: Annotated[str, typer.Option(help="Folder or name of the model, as transformers loads it.")],
    socket_path: Annotated[Path | None, typer.Option("--socket", help="Unix socket, made with mode 0600.")] = None,
    host: Annotated[str | None, typer.Option(help="TCP host; beyond loopback with TLS and tokens only.")] = None,
    port: Annotated[int, typer.Option(help="TCP port, 0 for any free one.", min=0, max=65535)] = 0,
    certificate: Annotated[Path | None, typer.Option(help="PEM file of the certificate, for TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tokens_path: Annotated[Path | None, typer.Option("--tokens", help="Tokens that may ask this worker.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Address of the prefill worker, for a decoding one.")] = None,
    service: Annotated[str | None, typer.Option(help="Address of the anchor service, as the engine's store.")] = None,
    through_store: Annotated[bool, typer.Option(help="Take prefills out of the service, not directly.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="Token for prefill worker and service.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of who signed their certificates, for TLS.")] = None,
    namespace: Annotated[str, typer.Option(help="Tenant that this worker serves.")] = "default",
    slots: Annotated[int, typer.Option(help="Requests at work at once.", min=1, max=1024)] = 1,
) -> None:
    """Run a worker (docs/service.md). It prints ``listening on ADDRESS`` when it is ready; SIGTERM ends it."""
    from kvcomm.errors import InvalidInput, KVCommError
    from kvcomm.hf.engine import Engine
    from kvcomm.hf.load import load
    from kvcomm.reuse.policy import Exact
    from kvcomm.serve.log import to_stderr
    from kvcomm.serve.server import Server
    from kvcomm.serve.service import address_of, local_door
    from kvcomm.serve.tokens import TokenFile
    from kvcomm.serve.worker import Worker
    from kvcomm.serve.worker_client import WorkerClient
    from kvcomm.serve.worker_session import WorkerSession
    from kvcomm.transfer.auth import read_token
    from kvcomm.transfer.bind import listen_tcp, listen_unix
    from kvcomm.transfer.remote import RemoteStore
    from kvcomm.transfer.tls import client_context, server_context

    to_stderr(False)
    bound: Path | None = None
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        if (certificate is None) != (key is None):
            raise InvalidInput("a certificate needs its key and the other way round; pass both or neither")
        if (socket_path is None) == (host is None):
            raise InvalidInput("a worker listens on --socket or on --host; pass one of them")
        tls = None if certificate is None or key is None else server_context(certificate, key)
        tokens = None if tokens_path is None else TokenFile(tokens_path)
        if socket_path is not None:
            if tls is not None:
                raise InvalidInput("TLS belongs to TCP; leave --socket or --certificate out")
            listener = listen_unix(socket_path.absolute())
            bound = socket_path
        else:
            listener = listen_tcp(host or "", port, tls=tls, tokens=tokens is not None)
        shown = read_token(token_file)
        token = None if shown is None else shown.reveal()
        trusted = None if ca is None else client_context(ca)
        known = None if token is None else {namespace: token}
        store = None if service is None else RemoteStore(service, tokens=known, tls=trusted)
        engine = Engine(*load(model), store=store, policy=Exact(), namespace=namespace)
        prefiller = None if prefill is None else WorkerClient(prefill, namespace, token=token, tls=trusted)
        made = Worker(engine, role, prefiller=prefiller, through_store=through_store, slots=slots)
        if tokens is None:
            server = Server(lambda wire: WorkerSession(made, wire, local_door), [listener], tls=tls)
        else:
            check, holds = tokens.authenticate, tokens.holds
            server = Server(lambda wire: WorkerSession(made, wire, check, holds), [listener], tls=tls)
        server.start()
    except KVCommError as error:
        print(f"kvcomm worker: {error}", file=sys.stderr)
        if bound is not None:
            bound.unlink(missing_ok=True)
        raise typer.Exit(2) from error
    print(f"listening on {address_of(listener)}", flush=True)
    while not ended.wait(3600.0):
        pass
    server.stop()
    if bound is not None:
        bound.unlink(missing_ok=True)
    try:
        engine.close()
        if store is not None:
            store.close()
    except KVCommError as error:
        print(f"kvcomm worker: not everything was kept: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
