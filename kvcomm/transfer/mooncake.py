"""The tier on a Mooncake cluster: values in parts, a manifest written last, a catalogue beside. See docs/mooncake.md.

Mooncake has no login. With a keyring everything is sealed and every name opaque, under keys of the namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from kvcomm.errors import CorruptEntry, StoreError, StoreUnavailable
from kvcomm.keys import CacheKey
from kvcomm.store.base import (
    DEFAULT_LEASE_S,
    Deadline,
    Entry,
    Handle,
    Listing,
    Priority,
    Receipt,
    Store,
    StoreStats,
    check_lease,
)
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, Blobs, MemoryBlobs
from kvcomm.store.codec import BytesSource, EntryReader, EntryWriter, SeenHeads, entry_name
from kvcomm.store.encoding import encoding as known_encoding
from kvcomm.store.eviction import UNLIMITED
from kvcomm.store.seal import Keyring
from kvcomm.store.tally import Tally
from kvcomm.transfer.catalogue import Catalogue, Row
from kvcomm.transfer.mooncake_config import MooncakeConfig
from kvcomm.transfer.mooncake_engine import MooncakeEngine, PartMissing
from kvcomm.transfer.mooncake_handle import Lent, MooncakeHandle
from kvcomm.transfer.mooncake_listing import listed, row_of
from kvcomm.transfer.mooncake_manifest import Manifest, decode_manifest
from kvcomm.transfer.mooncake_parts import PartsSource, write_parts
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

T = TypeVar("T")


class MooncakeStore(Store):
    """One client of a cluster. Any number of stores, on any number of hosts, share what is in it.

    A get after an acknowledged put may miss: the cluster evicts, and nodes die. It never gives other bytes.

    Args:
        config: where the cluster is, and how values are cut and placed.
        blobs: where named blobs and the catalogue lie: those of the anchor service (``RemoteStore.blobs``) for many
            hosts, of a DiskStore for one. None keeps them in this process: entries that others put are found by key,
            but not listed, and dropping a group or a namespace does not reach them.
        keyring: seals values, manifests and the catalogue's rows.
        encoding: ``raw``, or the lossy ``int8`` or ``fp8``.
        max_handles: handles that may be out at once; each holds a copy of its value.

    ``entries()`` and ``stats()`` without a namespace tell of those that this store has used.

    Raises:
        StoreUnavailable: Mooncake does not load, or its master cannot be reached.
    """

    durable = False

    def __init__(
        self, config: MooncakeConfig, *, blobs: Blobs | None = None, keyring: Keyring | None = None,
        encoding: str = "raw", max_handles: int = 64, name: str = "mooncake",
        clock: Callable[[], float] = time.time, deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:  # fmt: skip
        self.name, self.encoding = name, known_encoding(encoding).name
        self.blobs = MemoryBlobs() if blobs is None else blobs
        self._config, self._keyring, self._clock = config, keyring, clock
        self._catalogue = Catalogue(self.blobs)
        self._tally, self._lent, self._seen = Tally(), Lent(max_handles), SeenHeads()
        self._namespaces: dict[str, Namespace] = {}
        self._refused: dict[bytes, None] = {}
        self._closed = False
        self._engine = MooncakeEngine(config, Deadline(deadline_s))

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        self._use(key.namespace)
        entry.check(key)
        deadline, now = Deadline(deadline_s), self._clock()
        name, namespace = entry_name(key, self._keyring), key.namespace.name
        with suppress(CorruptEntry):
            found = self._manifest(key, name, deadline)
            if found is not None:
                self._tally.add(namespace, "existed")
                return Receipt(False, False, found.nbytes)
        writer = EntryWriter(key, entry, self.encoding, now, entry.ends(now), self._keyring)
        manifest = Manifest.new(
            writer.nbytes, self._config.part_bytes, entry.attributes.priority, writer.head.expires_s
        )
        try:
            stored = self._write(key, name, manifest, writer, deadline)
        except BaseException:
            self._refuse(manifest)
            with suppress(StoreError):
                self._engine.remove(manifest.part_names(self._config.prefix), Deadline(max(deadline.left(), 1.0)))
            self._tally.add(namespace, "failed")
            raise
        self._tally.add(namespace, "puts" if stored else "existed")
        return Receipt(stored, False, writer.nbytes)

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        self._use(key.namespace)
        check_lease(lease_s)
        self._lent.check()

        def lend(manifest: Manifest, source: PartsSource) -> Handle:
            EntryReader(source, key.namespace.name, key, self._keyring, self._seen)  # before memory is taken
            data = bytearray(manifest.nbytes)
            source.readv([memoryview(data)], 0)
            reader = EntryReader(BytesSource(data), key.namespace.name, key, self._keyring, self._seen)
            reader.verify()
            handle = MooncakeHandle(reader, reader.segment(), manifest.expires_s, lease_s)
            self._lent.add(handle)
            return handle

        return self._read(key, Deadline(deadline_s), lend)

    def get_into(self, key: CacheKey, out: SegmentKV, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Segment | None:
        self._use(key.namespace)

        def copy(_: Manifest, source: PartsSource) -> Segment:
            reader = EntryReader(source, key.namespace.name, key, self._keyring, self._seen)
            out.check(key.fingerprint, reader.head.tokens)
            segment = reader.segment()
            reader.read_into(out)
            return segment

        return self._read(key, Deadline(deadline_s), copy)

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._use(key.namespace)
        with suppress(CorruptEntry):
            return self._manifest(key, entry_name(key, self._keyring), Deadline(deadline_s)) is not None
        return False

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._use(key.namespace)
        deadline, name = Deadline(deadline_s), entry_name(key, self._keyring)
        parts: list[str] = []
        with suppress(CorruptEntry):
            found = self._manifest(key, name, deadline)
            parts = [] if found is None else found.part_names(self._config.prefix)
        there = self._engine.remove([self._object(name), *parts], deadline)[0]
        self._catalogue.remove(key.namespace, name, None, deadline)
        return there

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._use(namespace)
        deadline = Deadline(deadline_s)
        count = self._remove(list(self._catalogue.rows(namespace)), deadline)
        self.blobs.delete_namespace(namespace)
        return count

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._use(namespace)
        deadline = Deadline(deadline_s)
        rows = [row for row, found in self._rows(namespace) if found.attributes.group == group]
        count = self._remove(rows, deadline)
        for row in rows:
            self._catalogue.remove(namespace, row.name, row.tag, deadline)
        return count

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._use(key.namespace)
        deadline, name, now = Deadline(deadline_s), entry_name(key, self._keyring), self._clock()
        found = self._manifest(key, name, deadline)
        if found is None:
            return False
        if ttl_s is not None and found.expires_s is not None:
            longer = found.until(now + ttl_s)
            data = longer.encode(key.namespace.name, name, self._keyring)
            placing = self._config.placing[found.priority]
            self._engine.put_small(self._object(name), data, placing, found.tag.hex(), deadline, replace=True)
            self._catalogue.renew(key.namespace, name, longer.expires_s or 0.0, deadline)
        return True

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        self._check_open()
        for one in list(self._namespaces.values()) if namespace is None else [namespace]:
            for _, found in self._rows(one):
                alive = found.expires_s is None or found.expires_s > self._clock()
                if alive and fingerprint in (None, found.key.fingerprint):
                    yield found

    def sweep(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Take what is gone from the cluster, or has outlived its time, out of the catalogue; how many rows."""
        self._use(namespace)
        deadline, count = Deadline(deadline_s), 0
        for row in list(self._catalogue.rows(namespace)):
            outlived = row.expires_s is not None and row.expires_s <= self._clock()
            if outlived:
                self._remove([row], deadline)
            if outlived or self._engine.get_small(self._object(row.name), deadline) is None:
                self._catalogue.remove(namespace, row.name, row.tag, deadline)
                count += 1
        return count

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        self._check_open()
        held = list(self.entries(namespace))
        counters = self._tally.read(None if namespace is None else namespace.name)
        return StoreStats(self.name, len(held), sum(e.nbytes for e in held), UNLIMITED, UNLIMITED, counters)

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._check_open()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._lent.close()
            self._engine.close()

    def _write(self, key: CacheKey, name: str, manifest: Manifest, writer: EntryWriter, deadline: Deadline) -> bool:
        """Parts, then the catalogue's row, then the manifest. Whether this put is the one that is held."""
        placing, namespace = self._config.placing[writer.head.attributes.priority], key.namespace.name
        write_parts(self._engine, manifest, self._config.prefix, writer, placing, deadline)
        row = row_of(name, manifest, next(iter(writer))[0])
        self._remove(self._catalogue.add(key.namespace, row, deadline), deadline, but=name)
        data = manifest.encode(namespace, name, self._keyring)
        self._engine.put_small(self._object(name), data, placing, manifest.tag.hex(), deadline)
        held = self._stored_manifest(key, name, deadline)
        if held is None:
            raise StoreUnavailable(f"{key} was evicted while it was put; the cluster is full, add nodes")
        if held.tag != manifest.tag:
            self._engine.remove(manifest.part_names(self._config.prefix), deadline)
        return held.tag == manifest.tag

    def _manifest(self, key: CacheKey, name: str, deadline: Deadline) -> Manifest | None:
        """The value's manifest, or None; one that has outlived its time, or is not to be believed, is removed."""
        found = self._stored_manifest(key, name, deadline)
        if found is None:
            return None
        if found.tag not in self._refused and (found.expires_s is None or found.expires_s > self._clock()):
            return found
        self._forget(key, name, found, deadline)
        return None

    def _stored_manifest(self, key: CacheKey, name: str, deadline: Deadline) -> Manifest | None:
        """The manifest as it lies there, or None.

        An object that is removed leaves its memory to the next one, under those who read it just then. So bytes that
        fail their check are read again, and only the same bytes a second time are corrupt.

        Raises:
            CorruptEntry: it fails its check; it is removed.
        """
        failed = None
        while (data := self._engine.get_small(self._object(name), deadline)) is not None:
            try:
                return decode_manifest(data, key.namespace.name, name, self._keyring)
            except CorruptEntry:
                if data == failed:
                    self._engine.remove([self._object(name)], deadline)
                    self._tally.add(key.namespace.name, "corrupt")
                    raise
            failed = data
        return None

    def _read(self, key: CacheKey, deadline: Deadline, use: Callable[[Manifest, PartsSource], T]) -> T | None:
        """What ``use`` makes of the value's bytes, or None. A value with a part missing is a miss.

        As with the manifest, a put's parts must fail their check twice to be corrupt; they may be removed meanwhile.
        """
        name, namespace, failed = entry_name(key, self._keyring), key.namespace.name, b""
        while (manifest := self._manifest(key, name, deadline)) is not None:
            try:
                with self._engine.parts.lend(len(manifest.sizes), deadline) as loan:
                    result = use(manifest, PartsSource(self._engine, manifest, self._config.prefix, loan, deadline))
                self._tally.add(namespace, "hits")
                return result
            except PartMissing:
                self._forget(key, name, manifest, deadline)
                self._tally.add(namespace, "missing parts")
                break
            except CorruptEntry:
                if manifest.tag == failed:
                    self._forget(key, name, manifest, deadline)
                    self._tally.add(namespace, "corrupt")
                    raise
                failed = manifest.tag
        self._tally.add(namespace, "misses")
        return None

    def _forget(self, key: CacheKey, name: str, manifest: Manifest, deadline: Deadline) -> None:
        """Remove what is left of a value; if even that fails, do not believe its manifest again."""
        self._refuse(manifest)
        names = [self._object(name), *manifest.part_names(self._config.prefix)]
        with suppress(StoreError):
            self._engine.remove(names, deadline)
            self._catalogue.remove(key.namespace, name, manifest.tag, deadline)

    def _refuse(self, manifest: Manifest) -> None:
        self._refused[manifest.tag] = None
        while len(self._refused) > 4096:
            with suppress(KeyError, StopIteration):
                del self._refused[next(iter(self._refused))]

    def _remove(self, rows: list[Row], deadline: Deadline, but: str = "") -> int:
        """Remove the values of ``rows``; of the one named ``but`` only the parts. How many were there."""
        count = 0
        for row in rows:
            parts = Manifest(row.nbytes, row.part_bytes, row.tag, Priority.HISTORY, None).part_names(
                self._config.prefix
            )
            own = [] if row.name == but else [self._object(row.name)]
            gone = self._engine.remove([*own, *parts], deadline)
            count += bool(own) and gone[0]
        return count

    def _rows(self, namespace: Namespace) -> Iterator[tuple[Row, Listing]]:
        for row in self._catalogue.rows(namespace):
            found = listed(row, namespace.name, self._keyring)
            if found is not None:
                yield row, found

    def _object(self, name: str) -> str:
        return self._config.prefix + name

    def _use(self, namespace: Namespace) -> None:
        self._check_open()
        self._namespaces.setdefault(namespace.name, namespace)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"tier {self.name!r} is closed; open a new one")
