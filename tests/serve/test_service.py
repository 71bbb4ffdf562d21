"""The command: who gets in, over TLS with a token; what restarts keep; where it listens; what it writes down."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvcomm.errors import AccessDenied, StoreUnavailable
from kvcomm.serve.tokens import TokenFile
from kvcomm.store import Attributes, Keyring, MemoryStore
from kvcomm.store.testing import ONE, holds, sample
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.remote import RemoteStore
from kvcomm.transfer.tls import client_context
from tests.serve.here import service_here
from tests.serve.process import ServiceProcess


def token(folder: Path, namespace: str, *rights: str) -> str:
    folder.mkdir(mode=0o700, exist_ok=True)
    with TokenFile(folder / "tokens.sqlite", create=True) as tokens:
        from kvcomm.types import Namespace

        return tokens.create(Namespace(namespace), frozenset(rights)).reveal()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    os.chmod(key, 0o600)
    return cert, key


def test_tls_with_a_token_and_rights(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    kept = tmp_path / "kept"
    writes, reads = token(kept, "one", "read", "write"), token(kept, "one", "read")
    options = ["--certificate", str(cert), "--key", str(key)]
    with ServiceProcess(kept, *options, tcp=True) as service:
        tls = client_context(cert)
        with RemoteStore(service.address, tokens={"one": writes}, tls=tls) as store:
            large = sample(1, tokens=40000)
            assert store.put(*large).stored
            assert holds(store, 1, tokens=40000)
            with pytest.raises(AccessDenied):
                store.delete_namespace(ONE)
            with pytest.raises(AccessDenied):
                store.put(*sample(1, namespace=type(ONE)("two")))
        with RemoteStore(service.address, tokens={"one": reads}, tls=tls) as store:
            assert holds(store, 1, tokens=40000)
            with pytest.raises(AccessDenied):
                store.put(*sample(2))
        for wrong in ("one", "", "kvc_" + "0" * 16 + "_" + "A" * 43):
            with RemoteStore(service.address, tokens={"one": wrong}, tls=tls) as store, pytest.raises(AccessDenied):
                store.contains(sample(1)[0])
        plain = RemoteStore(service.address, tokens={"one": writes}, breaker=Breaker(limit=10**6))
        with pytest.raises(StoreUnavailable):
            plain.contains(sample(1)[0], deadline_s=1.0)


def test_a_revoked_token_ends_open_connections(tmp_path: Path) -> None:
    from kvcomm.serve import session

    with service_here(tmp_path) as (service, address), RemoteStore(address) as store:
        store.put(*sample(1))
        service.core.holds = lambda grant: False
        session_s, session.GRANT_S = session.GRANT_S, 0.0
        try:
            with pytest.raises(AccessDenied):
                store.contains(sample(1)[0])
        finally:
            session.GRANT_S = session_s


def test_restart_keeps_entries_blobs_and_drops(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "kept", "--status-port", "0") as service:
        assert service.process.stdout is not None
        page = service.process.stdout.readline().split()[-1]
        owner = (ONE, sample(0)[0].fingerprint)
        with RemoteStore(service.address) as store:
            assert store.durable
            assert store.put(*sample(1)).durable
            store.put(*sample(2, attributes=Attributes(group="g")))
            store.blobs.write(owner, "offsets", b"x" * 20_000_000)
            store.delete_group(ONE, "g")
            assert store.health(ONE) < 5.0
        mode = os.stat(service.folder / "anchors.sock").st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert b"kvcomm anchor service" in answer.read()
        with urllib.request.urlopen(f"{page}metrics", timeout=10) as answer:
            assert b"kvcomm_request_seconds" in answer.read()
        assert service.stop() == 0
        assert not (service.folder / "anchors.sock").exists()
        service.start()
        told: list[str] = []
        with RemoteStore(service.address, on_drop=[lambda namespace, group: told.append(group)]) as store:
            assert holds(store, 1)
            assert not holds(store, 2)
            assert store.blobs.read(owner, "offsets") == b"x" * 20_000_000


def test_loopback_unless_tls_and_tokens(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvcomm.cli",
        "anchors",
        "serve",
        "--dir",
        str(tmp_path / "k"),
        "--host",
        "0.0.0.0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "TLS and tokens" in done.stderr


def test_logs_are_json_without_content(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "kept", "--verbose") as service:
        key, entry = sample(1, attributes=Attributes(group="canary-group"))
        with RemoteStore(service.address) as store:
            store.put(key, entry)
            holds(store, 1)
            with pytest.raises(Exception, match="not a positive"):
                store.get(key, deadline_s=-1)
        service.process.terminate()
        _, logs = service.process.communicate(timeout=30)
    lines = [json.loads(line) for line in logs.splitlines()]
    assert {"put", "open"} <= {line.get("call") for line in lines}
    for secret in ("canary-group", key.content, key.digest, *map(str, entry.segment.token_ids)):
        assert secret not in logs


def test_a_sealed_store_under_the_service_serves_plain_entries(tmp_path: Path) -> None:
    from kvcomm.serve.service import Service, Settings, local_door
    from kvcomm.transfer.bind import listen_unix

    path = tmp_path / "s.sock"
    ring = Keyring(b"k" * 32)
    service = Service(Settings(tmp_path / "kept", 1 << 20), [listen_unix(path)], local_door, keyring=ring)
    service.start()
    with RemoteStore(f"unix:{path}") as store:
        store.put(*sample(1, tokens=50))
        assert holds(store, 1, tokens=50)
    service.core.store = MemoryStore(1 << 20)
    with RemoteStore(f"unix:{path}") as store:
        store.put(*sample(2, tokens=50))
        assert holds(store, 2, tokens=50)
    service.stop()
