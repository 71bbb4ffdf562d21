"""Named blobs of a service. An update reads, merges here, and is written only if nobody else wrote in between."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator

from kvcomm.errors import CorruptEntry
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, Blobs, Owner, check_name
from kvcomm.transfer.client import Client
from kvcomm.transfer.names import fingerprint_text
from kvcomm.transfer.upload import write_blob
from kvcomm.types import Namespace


class RemoteBlobs(Blobs):
    """Blobs through the clients of a RemoteStore."""

    def __init__(self, client: Callable[[Namespace], Client]) -> None:
        self._client = client

    def read(self, owner: Owner, name: str) -> bytes | None:
        return self._read(owner, name, Deadline(DEFAULT_DEADLINE_S))

    def update(
        self, owner: Owner, name: str, merge: Callable[[bytes | None], bytes], *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        deadline = Deadline(deadline_s)
        header = {"call": "blob_write", **_named(owner, name)}
        while True:
            try:
                old = self._read(owner, name, deadline)
            except CorruptEntry:
                old = None
            digest = "" if old is None else hashlib.sha256(old).hexdigest()
            if write_blob(self._client(owner[0]), {**header, "old": digest}, bytes(merge(old)), deadline):
                return
            if not deadline.left():
                raise deadline.error(f"other clients' updates of blob {name}")
            time.sleep(random.uniform(0.0, 0.02))

    def delete(self, owner: Owner, name: str) -> bool:
        call = {"call": "blob_delete", **_named(owner, name)}
        return self._client(owner[0]).call(call, Deadline(DEFAULT_DEADLINE_S)).header.truth("found")

    def delete_namespace(self, namespace: Namespace) -> None:
        """Forget all blobs of a namespace, and its entries with them: the service has one call for both."""
        self._client(namespace).call({"call": "delete_namespace"}, Deadline(DEFAULT_DEADLINE_S))

    def names(self, owner: Owner) -> Iterator[str]:
        call = {"call": "blob_names", "fingerprint": fingerprint_text(owner[1])}
        answer = self._client(owner[0]).call(call, Deadline(DEFAULT_DEADLINE_S)).header
        return iter(answer.texts("names", 64, 64))

    def _read(self, owner: Owner, name: str, deadline: Deadline) -> bytes | None:
        answer = self._client(owner[0]).call({"call": "blob_read", **_named(owner, name)}, deadline)
        return bytes(answer.payload) if answer.header.truth("found") else None


def _named(owner: Owner, name: str) -> dict[str, object]:
    return {"fingerprint": fingerprint_text(owner[1]), "name": check_name(name)}
