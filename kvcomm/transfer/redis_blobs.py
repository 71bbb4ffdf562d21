"""Named blobs in Redis: one value each, replaced by compare and set, so that no update of another process is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.store.base import Deadline
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, MAX_BLOBS, Blobs, Owner, check_name
from kvcomm.store.seal import Keyring
from kvcomm.store.statistics import BLOB_HEAD_BYTES, decode_blob, encode_blob
from kvcomm.transfer.redis_calls import Calls
from kvcomm.transfer.redis_value import Names
from kvcomm.types import Namespace

MAX_VALUE_BYTES = 512 << 20  # of a value in Redis, proto-max-bulk-len as it comes


class RedisBlobs(Blobs):
    """Blobs at ``prefix:namespace:b:fingerprint:name``. Heads hold a random salt: equal heads are equal blobs."""

    def __init__(self, calls: Calls, names: Names, keyring: Keyring | None) -> None:
        self._calls, self._names, self._keyring = calls, names, keyring

    def read(self, owner: Owner, name: str) -> bytes | None:
        key, deadline = self._key(owner, name), Deadline(DEFAULT_DEADLINE_S)
        raw = self._read(key, name, deadline)
        if raw is None:
            return None
        try:
            return decode_blob(owner, name, raw, self._keyring)
        except CorruptEntry:
            self._calls.remove_if(key, raw[:BLOB_HEAD_BYTES], deadline)
            raise

    def update(
        self, owner: Owner, name: str, merge: Callable[[bytes | None], bytes], *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:
        """See ``Blobs``; ``merge`` is called again for each update of others that comes between."""
        key, deadline = self._key(owner, name), Deadline(deadline_s)
        while True:
            raw = self._read(key, name, deadline)
            if raw is None and sum(1 for _ in self.names(owner)) >= MAX_BLOBS:
                raise InvalidInput(f"blob {name} would be one more than {MAX_BLOBS}; delete one")
            data = encode_blob(owner, name, bytes(merge(self._decode(owner, name, raw))), self._keyring)
            if len(data) > MAX_VALUE_BYTES:
                raise InvalidInput(f"blob {name} of {len(data)} bytes exceeds {MAX_VALUE_BYTES}; split it")
            if self._calls.set_if(key, (raw or b"")[:BLOB_HEAD_BYTES], data, deadline):
                return
            if not deadline.left():
                raise deadline.error(f"other updates of blob {name}")
            time.sleep(random.uniform(0, 0.01))

    def delete(self, owner: Owner, name: str) -> bool:
        key = self._key(owner, name)
        return bool(self._calls.run("deleting", lambda c: c.unlink(key), Deadline(DEFAULT_DEADLINE_S)))

    def delete_namespace(self, namespace: Namespace) -> None:
        deadline = Deadline(DEFAULT_DEADLINE_S)
        for keys in self._calls.scan(self._names.pattern(namespace.name, "b"), deadline):
            self._calls.batch("deleting", [("UNLINK", key) for key in keys], deadline)

    def names(self, owner: Owner) -> Iterator[str]:
        namespace, fingerprint = owner
        start = self._names.blob(namespace.name, fingerprint.digest, "")
        for keys in self._calls.scan(start + "*", Deadline(DEFAULT_DEADLINE_S)):
            yield from (key.removeprefix(start) for key in keys)

    def _read(self, key: str, name: str, deadline: Deadline) -> bytes | None:
        raw: bytes | None = self._calls.run(f"reading blob {name}", lambda c: c.get(key), deadline)
        return raw

    def _decode(self, owner: Owner, name: str, raw: bytes | None) -> bytes | None:
        try:
            return None if raw is None else decode_blob(owner, name, raw, self._keyring)
        except CorruptEntry:
            return None

    def _key(self, owner: Owner, name: str) -> str:
        return self._names.blob(owner[0].name, owner[1].digest, check_name(name))
