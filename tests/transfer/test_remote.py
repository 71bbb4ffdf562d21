"""The contract of stores on a remote store, against a real service process, over both kinds of socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvcomm.store import MemoryStore, Store, TieredStore
from kvcomm.store.testing import ONE, TWO, StoreContract
from kvcomm.transfer.remote import RemoteStore
from tests.serve.process import ServiceProcess


class _Contract(StoreContract):
    """One process for the whole class; each test empties the two namespaces that it may use."""

    tcp: ClassVar[bool] = False
    service: ClassVar[ServiceProcess]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with ServiceProcess(tmp_path_factory.mktemp("service") / "kept", tcp=cls.tcp) as cls.service:
            yield

    def make_store(self, folder: Path) -> Store:
        store = RemoteStore(self.service.address)
        for namespace in (ONE, TWO):
            store.delete_namespace(namespace)
        return store


class TestUnixSocket(_Contract):
    pass


class TestTcp(_Contract):
    tcp = True


class TestUnderMemory(_Contract):
    def make_store(self, folder: Path) -> Store:
        return TieredStore([MemoryStore(1 << 20), super().make_store(folder)])
