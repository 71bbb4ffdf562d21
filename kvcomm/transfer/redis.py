"""A tier in Redis or Valkey: what any platform already runs, with its users, TLS, limits and replicas. docs/redis.md.

Redis decides what it evicts, so a pin holds nothing there: an entry that loses a part is a miss, never other bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.errors import CorruptEntry, InvalidInput, StoreError
from kvcomm.keys import CacheKey
from kvcomm.store.base import (
    DEFAULT_LEASE_S,
    Deadline,
    Entry,
    Handle,
    Listing,
    Receipt,
    Store,
    StoreStats,
    check_lease,
)
from kvcomm.store.blobs import DEFAULT_DEADLINE_S, Blobs
from kvcomm.store.codec import EntryReader, EntryWriter, SeenHeads, entry_name
from kvcomm.store.encoding import encoding as known_encoding
from kvcomm.store.eviction import UNLIMITED
from kvcomm.store.seal import Keyring
from kvcomm.store.tally import Tally
from kvcomm.transfer.redis_value import (
    FIXED_BYTES,
    GRACE_S,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    Manifest,
    Names,
    PartGone,
    RedisSource,
)
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

if TYPE_CHECKING:
    from kvcomm.transfer.redis_connection import Server
    from kvcomm.transfer.redis_handle import RedisHandle
    from kvcomm.transfer.redis_lookup import Place

DEFAULT_PART_BYTES = 8 << 20


class RedisStore(Store):
    """Entries in Redis, or in a Redis Cluster. Making one does not contact the server.

    Args:
        server: where Redis is and who asks, or just its address, ``unix:/path`` or ``host:port`` of this machine.
        prefix: what all keys begin with; with the namespace it is what an ACL rule binds a user to.
        keyring: seals everything; a prefix is sealed, or not, as a whole.
        encoding: ``raw``, or the lossy ``int8`` or ``fp8``, which handles and listings then name.
        part_bytes: entries go in pieces of that size: one of them is all that a failed call repeats, and all memory
            that a put or a read takes beside the entry. 4 to 16 MiB are well.
        spread: in a cluster, lay the parts of an entry on all nodes, rather than on one.

    Raises:
        InvalidInput: an argument is wrong, or redis-py is not installed.
    """

    def __init__(
        self, server: Server | str, *, prefix: str = "kvcomm", keyring: Keyring | None = None, encoding: str = "raw",
        part_bytes: int = DEFAULT_PART_BYTES, spread: bool = False, name: str = "redis",
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        try:
            from kvcomm.transfer.redis_blobs import RedisBlobs
            from kvcomm.transfer.redis_calls import Calls
            from kvcomm.transfer.redis_connection import Server
            from kvcomm.transfer.redis_lookup import Lookup
        except ImportError as error:
            raise InvalidInput("a tier in Redis needs the redis package; install kvcomm[redis]") from error
        if not MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES:
            raise InvalidInput(f"part_bytes {part_bytes} is outside {MIN_PART_BYTES} to {MAX_PART_BYTES}")
        self.name = name
        self.durable = False  # Redis acknowledges before it syncs, whatever it syncs later
        self.encoding = known_encoding(encoding).name
        self._names = Names(prefix, spread)
        self._calls = Calls(Server(server) if isinstance(server, str) else server)
        self._keyring, self._part_bytes, self._clock = keyring, part_bytes, clock
        self._rooms: list[bytearray] = []
        self._seen = SeenHeads()
        self._tally = Tally()
        self._lookup = Lookup(self._calls, self._names, keyring, self._tally)
        self.blobs: Blobs = RedisBlobs(self._calls, self._names, keyring)

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        """See ``Store``. StoreFull says that Redis has no room; a put that its eviction undid raises as well."""
        from kvcomm.transfer.redis_upload import Upload

        entry.check(key)
        deadline, place, now_s = Deadline(deadline_s), self._place(key), self._clock()
        held = self._lookup.whole(place, deadline)
        if held is None:
            expires_s = entry.ends(now_s)
            writer = EntryWriter(key, entry, self.encoding, now_s, expires_s, self._keyring)
            room = self._room()
            try:
                upload = Upload(self._calls, place, writer, expires_s, room, self._clock)
                stored = upload.run(deadline)
            except StoreError:
                self._tally.add(place.namespace, "failed")
                raise
            finally:
                self._rooms.append(room)
            if stored:
                self._tally.add(place.namespace, "puts")
                return Receipt(True, self.durable, writer.nbytes)
            held = writer.nbytes
        self._tally.add(place.namespace, "existed")
        return Receipt(False, self.durable, held)

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        """See ``Store``. The lease keeps an entry from outliving its time under a read, and not from eviction."""
        check_lease(lease_s)
        deadline, place = Deadline(deadline_s), self._place(key)
        found = self._find(key, place, deadline)
        if found is not None and not self._lookup.has_parts("TOUCH", place, found[1], deadline):
            self._lookup.drop(place, found[1].encode(), None)
            found = None
        if found is None:
            self._tally.add(place.namespace, "misses")
            return None
        handle, manifest = found
        if handle.expires_s is not None and lease_s > GRACE_S:
            self._lookup.renew(place, manifest, int(lease_s * 1000), None, deadline)
        self._tally.add(place.namespace, "hits")
        return handle

    def get_into(self, key: CacheKey, out: SegmentKV, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Segment | None:
        deadline, place = Deadline(deadline_s), self._place(key)
        found = self._find(key, place, deadline)
        if found is not None:
            try:
                found[0].read_before(out, deadline)
            except PartGone:
                found = None
        self._tally.add(place.namespace, "misses" if found is None else "hits")
        return None if found is None else found[0].segment

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        return self._used(key, "EXISTS", Deadline(deadline_s)) is not None

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        deadline, place = Deadline(deadline_s), self._place(key)
        keys = [place.key]
        with suppress(CorruptEntry):
            manifest = self._lookup.manifest(place, deadline)
            if manifest is None:
                return False
            keys += place.parts(manifest)
        return bool(self._calls.batch("deleting", [("UNLINK", each) for each in keys], deadline)[0])

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        deadline, count = Deadline(deadline_s), 0
        for kind in "epb":  # manifests first: what makes parts an entry
            for keys in self._calls.scan(self._names.pattern(namespace.name, kind), deadline):
                gone = self._calls.batch("deleting", [("UNLINK", key) for key in keys], deadline)
                count += sum(gone) if kind == "e" else 0
        return count

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        if not group:
            return 0
        deadline = Deadline(deadline_s)
        listed = self._lookup.listings(namespace, None, deadline)
        keys = [each.key for each in listed if each.attributes.group == group]
        return sum(self.delete(key, deadline_s=max(deadline.left(), 0.001)) for key in keys)

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        deadline = Deadline(deadline_s)
        manifest = self._used(key, "TOUCH", deadline)
        if manifest is not None and ttl_s is not None:
            parts_ms, entry_ms = int((ttl_s + GRACE_S) * 1000), max(1, int(ttl_s * 1000))
            self._lookup.renew(self._place(key), manifest, parts_ms, entry_ms, deadline)
        return manifest is not None

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        """See ``Store``. An entry that lost a part is listed until somebody asks for it."""
        return self._lookup.listings(namespace, fingerprint, Deadline(DEFAULT_DEADLINE_S))

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        sizes = [f.manifest.nbytes for f in self._lookup.manifests(namespace, 0, Deadline(DEFAULT_DEADLINE_S))]
        counters = self._tally.read(None if namespace is None else namespace.name)
        return StoreStats(self.name, len(sizes), sum(sizes), UNLIMITED, UNLIMITED, counters)

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Nothing is kept back here; asks whether the server is there."""
        self._calls.run("asking", lambda client: client.ping(), Deadline(deadline_s))

    def close(self) -> None:
        self._calls.close()

    def _find(self, key: CacheKey, place: Place, deadline: Deadline) -> tuple[RedisHandle, Manifest] | None:
        """The entry as far as its manifest tells, counted as neither hit nor miss."""
        from kvcomm.transfer.redis_handle import RedisHandle
        from kvcomm.transfer.redis_lookup import Parts, ends_s

        raw, ends_ms = self._calls.batch("reading", [("GET", place.key), ("PEXPIRETIME", place.key)], deadline)
        if raw is None:
            return None
        try:
            manifest = Manifest.decode(raw)
            parts = Parts(self._calls, place, manifest, deadline)
            source = RedisSource(manifest, raw[FIXED_BYTES:], parts)
            reader = EntryReader(source, place.namespace, key, self._keyring, self._seen)
            segment = reader.segment()
        except PartGone as error:
            self._lookup.drop(place, raw, error)
            return None
        except CorruptEntry as error:
            self._lookup.drop(place, raw, error)
            raise
        on_bad = partial(self._lookup.drop, place, raw)
        return RedisHandle(reader, segment, source, parts, ends_s(ends_ms), deadline.seconds, on_bad), manifest

    def _used(self, key: CacheKey, verb: str, deadline: Deadline) -> Manifest | None:
        """The manifest if all parts are there; ``verb`` as for ``Lookup.has_parts``."""
        place = self._place(key)
        try:
            manifest = self._lookup.manifest(place, deadline)
        except CorruptEntry:
            return None
        if manifest is None or not self._lookup.has_parts(verb, place, manifest, deadline):
            return None
        return manifest

    def _place(self, key: CacheKey) -> Place:
        from kvcomm.transfer.redis_lookup import Place

        return Place(self._names, key.namespace.name, entry_name(key, self._keyring))

    def _room(self) -> bytearray:
        """Memory for a part, used again: fresh memory costs as much as filling it."""
        try:
            return self._rooms.pop()
        except IndexError:
            return bytearray(self._part_bytes)
