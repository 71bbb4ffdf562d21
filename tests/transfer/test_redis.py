"""RedisStore keeps the store's contract on a real server: plain, sealed, over TLS as a bound user, in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.store import Keyring, Store
from kvcomm.store.testing import StoreContract, fingerprint
from kvcomm.transfer.redis import RedisStore
from tests.redis_server import RedisServer, needs_redis

WIDE = fingerprint(8, 4, 64)  # 16 KiB a token in float32
SMALL_PARTS = 64 << 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis()
    running = RedisServer(tmp_path / "redis")
    yield running
    running.stop()


class TestPlain(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, server: RedisServer) -> None:
        self.server = server

    def make_store(self, folder: Path) -> Store:
        return RedisStore(self.server.address)


class TestSealed(StoreContract):
    @pytest.fixture(autouse=True)
    def _serve(self, server: RedisServer) -> None:
        self.server = server

    def make_store(self, folder: Path) -> Store:
        pytest.importorskip("cryptography", reason="sealing needs cryptography; pip install kvcomm[crypto]")
        return RedisStore(self.server.address, keyring=Keyring(b"k" * 32), part_bytes=SMALL_PARTS)
