"""Entries as files. The files are the truth, the index counts. Order of steps and locks: docs/store.md."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvcomm.errors import CorruptEntry, StoreError, StoreUnavailable
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
from kvcomm.store.blobs_disk import FileBlobs
from kvcomm.store.codec import EntryReader, EntryWriter, SeenHeads, entry_name
from kvcomm.store.disk_files import open_locked, write_entry
from kvcomm.store.disk_handle import DiskHandle, FileSource, Leases, pin
from kvcomm.store.drafts import Draft, Drafts
from kvcomm.store.encoding import encoding as known_encoding
from kvcomm.store.eviction import UNLIMITED, FrequencyRecency, Limits, Policy, Quota, Usage
from kvcomm.store.files import Files, lock, trouble
from kvcomm.store.folder import Folder
from kvcomm.store.format import Head
from kvcomm.store.index import Index, Plan, Row
from kvcomm.store.seal import Keyring, opaque
from kvcomm.store.tally import Tally
from kvcomm.store.upkeep import Upkeep
from kvcomm.types import ModelFingerprint, Namespace

_POLL_S = 0.005


class DiskStore(Store):
    """A folder of entries. Several stores, in several processes, may have the same folder open.

    Args:
        root: the folder; made 0700 if it is not there.
        durable: fsync what is acknowledged. False only where a loss of power loses the folder anyway, as in /dev/shm.
        keyring: seals everything; a folder is sealed, or not, as a whole.
        encoding: ``raw``, or the lossy ``int8`` or ``fp8``, which handles and listings then name.
        max_handles: handles that may be out at once.
        draft_bytes: of files kept ready for ``draft``, beside ``max_bytes``; 0 for none. A sealed folder has none.

    Raises:
        InvalidInput: a limit or the encoding is wrong, or the folder belongs to another keyring.
        StoreUnavailable: the file system fails.
    """

    def __init__(
        self, root: str | Path, *, max_bytes: int = UNLIMITED, max_entries: int = UNLIMITED, quota: Quota | None = None,
        quotas: Mapping[str, Quota] | None = None, policy: Policy | None = None, durable: bool = True,
        keyring: Keyring | None = None, encoding: str = "raw", max_handles: int = 256, draft_bytes: int = 0,
        name: str = "disk",
        files: Files | None = None, clock: Callable[[], float] = time.time, deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:  # fmt: skip
        self.name = name
        self.encoding = known_encoding(encoding).name
        self._limits = Limits(Quota(max_bytes, max_entries), quota or Quota(), dict(quotas or {}))
        self._policy = policy or FrequencyRecency()
        self.durable = durable
        self._keyring = keyring
        self._files = files or Files()
        self._clock = clock
        self._tally = Tally()
        self._leases = Leases(max_handles)
        self._seen = SeenHeads()
        self._untrusted: set[str] = set()
        deadline = Deadline(deadline_s)
        with trouble(f"opening {root}"):
            self._folder = Folder(Path(root).absolute(), self._files, keyring, deadline)
            try:
                self.upkeep = Upkeep(self._folder, keyring, self._tally, deadline)
                self._folder.share()
            except BaseException:
                self._folder.close()
                raise
        self._index: Index = self.upkeep.index
        self.blobs: Blobs = FileBlobs(self._folder, keyring)
        self.drafts: Drafts | None = None
        if draft_bytes and keyring is None:
            self.drafts = Drafts(self._files, self._folder.temporary, draft_bytes)
        self._plan = Plan(self._limits, self._policy, self._evict, self._erase, self._folder.alive)
        self._closed = False

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        self._check_open()
        entry.check(key)
        now = self._clock()
        writer = EntryWriter(key, entry, self.encoding, now, entry.ends(now), self._keyring)
        return self._keep(writer.head, writer.nbytes, Deadline(deadline_s), lambda: self._written(writer))

    def adopt(self, draft: Draft, head: Head, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        """Keep a draft as the entry that it holds, as ``put`` would.

        Args:
            draft: every byte of it checked by the caller, and written to by nobody any more. Its ``adopted`` says
                afterwards whether it is still the caller's.
            head: what it says of itself.
        """
        self._check_open()
        if self.drafts is None:
            raise StoreUnavailable(f"tier {self.name!r} keeps no drafts; put the entry")
        drafts = self.drafts
        return self._keep(head, draft.nbytes, Deadline(deadline_s), lambda: drafts.adopt(draft, self.durable))

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        self._check_open()
        check_lease(lease_s)
        deadline, namespace = Deadline(deadline_s), key.namespace.name
        self._leases.check()
        name = entry_name(key, self._keyring)
        path = self._path(key, name)
        fd = None if name in self._untrusted else self._open(path, name, namespace)
        if fd is None:
            self._tally.add(namespace, "misses")
            return None
        try:
            status = os.fstat(fd)
            source = FileSource(self._files, fd, status.st_size)
            reader = EntryReader(source, namespace, key, self._keyring, self._seen)
            segment = reader.segment()
            if self._outlived(reader.head.expires_s, name, deadline):
                self._files.close(fd)
                self._tally.add(namespace, "misses")
                return None
            with suppress(OSError):
                pin(fd, status, lease_s)
        except CorruptEntry as error:
            self._files.close(fd)
            self._set_aside(path, name, namespace, error)
            raise
        except BaseException:
            self._files.close(fd)
            raise
        handle = DiskHandle(self._files, fd, reader, segment, lambda e: self._set_aside(path, name, namespace, e))
        self._leases.add(handle, lease_s)
        self._index.used(name, self._clock())
        self._tally.add(namespace, "hits")
        return handle

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._check_open()
        name = entry_name(key, self._keyring)
        row = self._index.find(name, Deadline(deadline_s))
        if row is None or row.owner or name in self._untrusted:
            return False
        return row.expires_s is None or row.expires_s > self._clock()

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        self._check_open()
        name = entry_name(key, self._keyring)
        path = self._path(key, name)
        with trouble(f"deleting {key}"):
            there = os.path.lexists(path)
            self._remove(path)
            if there and self.durable:
                self._files.fsync_folder(path.parent)
        return self._index.remove(name, Deadline(deadline_s)) or there

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._check_open()
        with trouble(f"deleting namespace {namespace}"):
            count = self._index.remove_where(self._plan, Deadline(deadline_s), namespace.name)
            self._folder.remove_tree(self._folder.root / "entries" / namespace.name)
            self.blobs.delete_namespace(namespace)
        return count

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        self._check_open()
        with trouble(f"deleting group {group!r}"):
            label = self._group(namespace.name, group)
            count = self._index.remove_where(self._plan, Deadline(deadline_s), namespace.name, label)
            if count and self.durable:
                for folder in self._files.scan(self._folder.root / "entries" / namespace.name):
                    self._files.fsync_folder(Path(folder.path))
        return count

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        if not self.contains(key, deadline_s=deadline_s):
            return False
        name, now = entry_name(key, self._keyring), self._clock()
        self._index.used(name, now)
        return True if ttl_s is None else self._index.renew(name, now + ttl_s, Deadline(deadline_s))

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        self._check_open()
        for path, _, listing, _ in self.upkeep.heads(namespace, fingerprint):
            if listing and not self._outlived(listing.expires_s, path.name, Deadline(DEFAULT_DEADLINE_S)):
                yield listing

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        self._check_open()
        usage = self._index.usage(Deadline(DEFAULT_DEADLINE_S))
        quota = self._limits.total if namespace is None else self._limits.of(namespace.name)
        used = list(usage.values()) if namespace is None else [usage.get(namespace.name, Usage())]
        counters = self._tally.read(None if namespace is None else namespace.name)
        entries, nbytes = sum(u.entries for u in used), sum(u.nbytes for u in used)
        return StoreStats(self.name, entries, nbytes, quota.max_bytes, quota.max_entries, counters)

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._check_open()
        self._index.flush(Deadline(deadline_s))

    def close(self) -> None:
        if self._closed:
            return
        with suppress(StoreError):
            self.flush()
        self._closed = True
        if self.drafts is not None:
            self.drafts.close()
        self._leases.close()
        self._index.close()
        self._folder.close()

    def expire(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Forget what outlived its time now, rather than at the next put; how many."""
        return self._index.expire(self._evict, self._clock(), Deadline(deadline_s))

    def sweep(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, int]:
        """Remove what crashes left over and what was set aside, and put the index right; counts of each."""
        self._check_open()
        return self.upkeep.sweep(Deadline(deadline_s))

    def usage(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> dict[str, Usage]:
        """What each namespace holds."""
        self._check_open()
        return self._index.usage(Deadline(deadline_s))

    def shrink(self, quota: Quota, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """Evict until the folder is within ``quota``; how many entries went."""
        self._check_open()
        return self._index.shrink(quota, self._plan, self._clock(), Deadline(deadline_s))

    def _keep(self, head: Head, nbytes: int, deadline: Deadline, make: Callable[[], Path]) -> Receipt:
        """Reserve room, let ``make`` write the whole entry to a temporary file, and give it its name."""
        if self.upkeep.read_only:
            raise StoreUnavailable("the disk was full when the store was opened; free space and open it again to put")
        key, kept, now = head.key, head.attributes, self._clock()
        row = Row(
            entry_name(key, self._keyring), key.namespace.name, key.fingerprint.digest[:16],
            self._group(key.namespace.name, kept.group), int(kept.priority), nbytes, now, now, 0, head.expires_s,
            self._folder.token,
        )  # fmt: skip
        held = self._reserve(row, deadline)
        if held is not None:
            self._tally.add(row.namespace, "existed")
            return Receipt(False, self.durable, held)
        try:
            with trouble(f"putting {key}"):
                self._place(row, make)
                self._files.point("index.commit")
                if not self._index.commit(row.name, row.owner, Deadline(max(deadline.left(), 1.0))):
                    raise StoreUnavailable(f"the reservation of {key} was lost; put it again")
                self._files.point("index.committed")
        except BaseException:
            self._abandon(row)
            raise
        self._untrusted.discard(row.name)
        self._tally.add(row.namespace, "puts")
        return Receipt(True, self.durable, nbytes)

    def _reserve(self, row: Row, deadline: Deadline) -> int | None:
        """None when the bytes are reserved; the size of the entry that is there already."""
        path = self._folder.entries(row.namespace, row.folder) / row.name
        while True:
            with trouble("reserving room"):
                self._files.point("index.reserve")
                state = self._index.reserve(row, self._plan, deadline)
            if state == "reserved":
                return None
            if state == "held":
                with suppress(OSError):
                    if row.name not in self._untrusted:
                        return os.lstat(path).st_size
                self._index.remove(row.name, deadline)
                continue
            if not deadline.left():
                raise deadline.error(f"another put of {row.name[:16]}")
            time.sleep(_POLL_S)

    def _written(self, writer: EntryWriter) -> Path:
        return write_entry(self._files, self._folder.temporary(), writer, self.durable)

    def _place(self, row: Row, make: Callable[[], Path]) -> None:
        folder = self._folder.entries(row.namespace, row.folder)
        self._folder.make(folder)
        temporary = make()
        try:
            try:
                self._files.rename(temporary, folder / row.name)
            except FileNotFoundError:
                self._folder.make(folder, again=True)
                self._files.rename(temporary, folder / row.name)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(temporary)
            raise
        if self.durable:
            self._files.fsync_folder(folder)

    def _abandon(self, row: Row) -> None:
        """After a failed put: nothing of it may be served, now or later, whatever still fails."""
        self._untrusted.add(row.name)
        with suppress(OSError):
            self._files.unlink(self._folder.entries(row.namespace, row.folder) / row.name)
            self._untrusted.discard(row.name)
        with suppress(StoreError):
            self._index.remove(row.name, Deadline(1.0), row.owner)
        self._tally.add(row.namespace, "failed")

    def _open(self, path: Path, name: str, namespace: str) -> int | None:
        try:
            return open_locked(self._files, path, name)
        except CorruptEntry as error:
            self._set_aside(path, name, namespace, error)
            raise

    def _outlived(self, expires_s: float | None, name: str, deadline: Deadline) -> bool:
        if expires_s is None or expires_s > self._clock():
            return False
        row = self._index.find(name, deadline)
        return row is None or row.expires_s is None or row.expires_s <= self._clock()

    def _evict(self, row: Row) -> bool:
        """Remove the file unless a lease holds it. Runs inside the index's transaction."""
        path = self._folder.entries(row.namespace, row.folder) / row.name
        try:
            fd = self._files.open(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            if not lock(fd, exclusive=True) and os.fstat(fd).st_atime > time.time():
                return False
        finally:
            self._files.close(fd)
        try:
            self._remove(path)
        except OSError:
            return False
        self._tally.add(row.namespace, "evictions")
        return True

    def _erase(self, row: Row) -> bool:
        self._remove(self._folder.entries(row.namespace, row.folder) / row.name)
        self._tally.add(row.namespace, "deleted")
        return True

    def _remove(self, path: Path) -> None:
        """Take an entry's name away; its file becomes a draft if nobody reads it and one is wanted. Raises OSError."""
        if self.drafts is None or not self.drafts.reuse(path):
            self._files.unlink(path)

    def _set_aside(self, path: Path, name: str, namespace: str, error: CorruptEntry) -> None:
        self._untrusted.add(name)
        with suppress(OSError):
            self._folder.set_aside(path)
            self._untrusted.discard(name)
        with suppress(StoreError):
            self._index.remove(name, Deadline(1.0))
        self._tally.add(namespace, "corrupt")

    def _path(self, key: CacheKey, name: str) -> Path:
        return self._folder.entries(key.namespace.name, key.fingerprint.digest) / name

    def _group(self, namespace: str, group: str) -> str:
        return opaque(self._keyring, namespace, group) if group else ""

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"tier {self.name!r} is closed; open a new one")
