"""A user bound to a namespace by ACL, TLS with a self-made certificate, refusals, and what lies on the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.errors import AccessDenied, InvalidInput, StoreUnavailable
from kvcomm.store import Keyring
from kvcomm.store.testing import ONE, TWO, StoreContract, holds, sample
from kvcomm.transfer.redis import RedisStore
from kvcomm.transfer.tls import client_context
from tests.redis_server import RedisServer, free_port, needs_redis
from tests.transfer.certificates import make

RULE = "resetchannels -@all +@read +@write +@connection +eval +ping -@dangerous +info +unlink"


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[RedisServer, Path]]:
    """TLS only, the default user off, a user for each namespace and an operator."""
    needs_redis()
    certificate, key = make(tmp_path / "tls")
    folder = tmp_path / "redis"
    folder.mkdir(mode=0o700)
    users = ["user default off", *(f"user {n} on >{n}-secret ~kvcomm:{n}:* {RULE}" for n in ("one", "two"))]
    (folder / "users.acl").write_text("\n".join(users) + "\n")
    port = free_port()
    options = [
        "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients",
        "no", "--aclfile", str(folder / "users.acl"),
    ]  # fmt: skip
    running = RedisServer(folder, options)
    running.port = port
    yield running, certificate
    running.stop()


def store_of(secure: tuple[RedisServer, Path], user: str, password: str = "", **more: object) -> RedisStore:
    from kvcomm.transfer.redis_connection import Server

    server, certificate = secure
    address = f"127.0.0.1:{server.port}"
    known = Server(address, username=user, password=password or f"{user}-secret", tls=client_context(certificate))
    return RedisStore(known, **more)  # type: ignore[arg-type]


def test_bound_user_works_in_its_namespace_and_nowhere_else(secure: tuple[RedisServer, Path]) -> None:
    with store_of(secure, "one") as mine, store_of(secure, "two") as theirs:
        assert mine.put(*sample(1)).stored
        assert theirs.put(*sample(2, namespace=TWO)).stored
        assert holds(mine, 1)
        for call in (
            lambda: theirs.get(sample(1)[0]),
            lambda: theirs.put(*sample(1)),
            lambda: theirs.delete(sample(1)[0]),
            lambda: theirs.contains(sample(1)[0]),
            lambda: theirs.blobs.read((ONE, sample(1)[0].fingerprint), "offsets"),
        ):
            with pytest.raises(AccessDenied):
                call()
        with pytest.raises(AccessDenied):
            theirs.delete_namespace(ONE)
        assert [e.key for e in theirs.entries()] == [sample(2, namespace=TWO)[0]]
        assert theirs.stats().entries == 1
        assert holds(mine, 1)
        assert mine.delete_namespace(ONE) == 1
        assert holds(theirs, 2, TWO)


def test_wrong_password_and_unknown_user_are_refused(secure: tuple[RedisServer, Path]) -> None:
    for user, password in (("one", "wrong"), ("nobody", "one-secret")):
        with store_of(secure, user, password) as store, pytest.raises(AccessDenied):
            store.get(sample(1)[0])


def test_unknown_certificate_is_refused(secure: tuple[RedisServer, Path], tmp_path: Path) -> None:
    other, _ = make(tmp_path / "other")
    with store_of((secure[0], other), "one") as store, pytest.raises(StoreUnavailable):
        store.get(sample(1)[0])


def test_another_machine_needs_tls() -> None:
    needs_redis()
    from kvcomm.transfer.redis_connection import Server

    for address in ("10.0.0.5:6379", "redis.example.com:6379"):
        with pytest.raises(InvalidInput, match="TLS|tls"):
            Server(address)
    for address in ("", "host", "host:", "host:0", "host:70000", "unix:", ":1"):
        with pytest.raises(InvalidInput):
            Server(address)


def test_password_is_not_shown() -> None:
    needs_redis()
    from kvcomm.transfer.redis_connection import Server

    assert "hidden" not in repr(Server("127.0.0.1:6379", password="hidden"))


def test_sealed_server_holds_neither_names_nor_tokens(secure: tuple[RedisServer, Path]) -> None:
    with store_of(secure, "one", keyring=Keyring(b"k" * 32)) as store, store_of(secure, "one") as plain:
        key, entry = sample(7, tokens=600)
        store.put(key, entry)
        raw = plain._calls.run  # what the server itself holds

        def dump(client: object) -> bytes:
            names = sorted(client.scan_iter(match="*"))  # type: ignore[attr-defined]
            return b"\n".join(names) + b"".join(client.get(name) for name in names)  # type: ignore[attr-defined]

        from kvcomm.store.base import Deadline

        held = raw("reading", dump, Deadline(10))
        assert key.digest.encode() not in held
        assert entry.kv.keys[0, 0].numpy().tobytes()[:64] not in held
        plain.put(*sample(8, tokens=600))  # the control: a plain one is there to be read
        assert sample(8, tokens=600)[1].kv.keys[0, 0].numpy().tobytes()[:64] in raw("reading", dump, Deadline(10))


class TestSecure(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, tmp_path: Path) -> Iterator[None]:
        needs_redis()
        certificate, key = make(tmp_path / "tls")
        self.certificate, port = certificate, free_port()
        files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
        self.server = RedisServer(
            tmp_path / "redis", ["--tls-port", str(port), *files, "--requirepass", "default-secret"]
        )
        self.server.port = port
        yield
        self.server.stop()

    def make_store(self, folder: Path) -> RedisStore:
        return store_of((self.server, self.certificate), "default", "default-secret")
