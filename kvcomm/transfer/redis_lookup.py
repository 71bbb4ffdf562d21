"""What is known of entries in Redis: found by name, one by one or all of a namespace, and removed where unusable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvcomm.errors import CorruptEntry, StoreError
from kvcomm.store.base import Deadline, Listing
from kvcomm.store.codec import FIRST_READ_BYTES, EntryReader
from kvcomm.store.seal import Keyring
from kvcomm.store.tally import Tally
from kvcomm.transfer.redis_calls import Calls
from kvcomm.transfer.redis_value import FIXED_BYTES, Manifest, Names
from kvcomm.types import ModelFingerprint, Namespace

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where one entry lies."""

    names: Names
    namespace: str
    name: str

    @property
    def key(self) -> str:
        """Key of its manifest."""
        return self.names.manifest(self.namespace, self.name)

    def parts(self, manifest: Manifest) -> list[str]:
        """Keys of its parts."""
        return self.names.parts(self.namespace, self.name, manifest)


class Parts:
    """Fetches parts of one entry, see ``RedisSource``; ``deadline`` is that of the read that runs."""

    def __init__(self, calls: Calls, place: Place, manifest: Manifest, deadline: Deadline) -> None:
        self._calls, self._manifest = calls, manifest
        self._keys = place.parts(manifest)
        self.deadline = deadline

    def __call__(self, number: int, start: int, end: int) -> bytes | None:
        key = self._keys[number]
        if (start, end) == (0, self._manifest.size_of(number)):
            command: tuple[object, ...] = ("GET", key)
        else:
            command = ("GETRANGE", key, start, end - 1)
        found: bytes | None = self._calls.run("reading", lambda c: c.execute_command(*command), self.deadline)
        return found


class Lookup:
    """Looks at entries without reading their payload."""

    def __init__(self, calls: Calls, names: Names, keyring: Keyring | None, tally: Tally) -> None:
        self._calls, self._names, self._keyring, self._tally = calls, names, keyring, tally

    def manifest(self, place: Place, deadline: Deadline) -> Manifest | None:
        """An entry's manifest without the entry's bytes. Raises CorruptEntry."""
        command = ("GETRANGE", place.key, 0, FIXED_BYTES - 1)
        raw = self._calls.run("looking", lambda client: client.execute_command(*command), deadline)
        return Manifest.decode(raw) if raw else None

    def whole(self, place: Place, deadline: Deadline) -> int | None:
        """Size of the entry if it is held whole; otherwise what there is of it is removed."""
        try:
            manifest = self.manifest(place, deadline)
        except CorruptEntry:
            self._calls.run("removing", lambda client: client.unlink(place.key), deadline)
            return None
        if manifest is None:
            return None
        if self.has_parts("EXISTS", place, manifest, deadline):
            return manifest.nbytes
        self.drop(place, manifest.encode(), None)
        return None

    def has_parts(self, verb: str, place: Place, manifest: Manifest, deadline: Deadline) -> bool:
        """Whether all parts are there; ``verb`` is EXISTS, or TOUCH to count it as a use."""
        return all(self._calls.batch("looking", [(verb, part) for part in place.parts(manifest)], deadline))

    def renew(self, place: Place, manifest: Manifest, parts_ms: int, entry_ms: int | None, deadline: Deadline) -> None:
        """Let parts, and the entry, last that long at least. What has no time to live is left so (GT)."""
        commands: list[tuple[object, ...]] = [("PEXPIRE", part, parts_ms, "GT") for part in place.parts(manifest)]
        if entry_ms is not None:
            commands.append(("PEXPIRE", place.key, entry_ms, "GT"))
        self._calls.batch("renewing", commands, deadline)

    def drop(self, place: Place, raw: bytes, error: StoreError | None) -> None:
        """Take an entry away that cannot be served: it is corrupt, or lost a part. One put since then stays."""
        self._tally.add(place.namespace, "corrupt" if isinstance(error, CorruptEntry) else "broken")
        deadline = Deadline(1.0)
        with suppress(StoreError):
            if self._calls.remove_if(place.key, raw[:FIXED_BYTES], deadline):
                parts = place.parts(Manifest.decode(raw))
                self._calls.batch("removing", [("UNLINK", part) for part in parts], deadline)

    def manifests(self, namespace: Namespace | None, more: int, deadline: Deadline) -> Iterator[Found]:
        """All manifests that this user may read, with the first ``more`` bytes of their entries."""
        pattern = self._names.pattern(None if namespace is None else namespace.name, "e")
        for keys in self._calls.scan(pattern, deadline):
            for start in range(0, len(keys), _BATCH):
                some = keys[start : start + _BATCH]
                asked = [c for k in some for c in (("GETRANGE", k, 0, FIXED_BYTES + more - 1), ("PEXPIRETIME", k))]
                answers = self._calls.try_batch("listing", asked, deadline)
                for key, raw, ends_ms in zip(some, answers[::2], answers[1::2], strict=True):
                    with suppress(CorruptEntry):
                        if isinstance(raw, bytes) and raw and isinstance(ends_ms, int):
                            yield Found(key, Manifest.decode(raw), raw[FIXED_BYTES:], ends_ms)

    def listings(
        self, namespace: Namespace | None, fingerprint: ModelFingerprint | None, deadline: Deadline
    ) -> Iterator[Listing]:
        """What is held, from heads alone; what is not an entry of this store is passed over."""
        for found in self.manifests(namespace, FIRST_READ_BYTES, deadline):
            owner = self._names.split(found.key)[0]
            try:
                head = EntryReader(_First(found, self._more(found.key, deadline)), owner, None, self._keyring).head
            except CorruptEntry:
                continue
            if fingerprint is None or head.key.fingerprint == fingerprint:
                yield Listing(
                    head.key, head.tokens, found.manifest.nbytes, head.encoding, head.attributes, head.created_s,
                    ends_s(found.ends_ms),
                )  # fmt: skip

    def _more(self, key: str, deadline: Deadline) -> Callable[[], bytes]:
        command = ("GETRANGE", key, FIXED_BYTES, -1)

        def more() -> bytes:
            found: bytes = self._calls.run("listing", lambda client: client.execute_command(*command), deadline)
            return found

        return more


@dataclass(frozen=True, slots=True)
class Found:
    """One manifest of a listing. ``ends_ms`` is Unix time in ms, negative for an entry without an end."""

    key: str
    manifest: Manifest
    first: bytes
    ends_ms: int


class _First:
    """The first bytes of an entry, as a ``codec.Source``; the rest of the manifest comes if they do not do."""

    def __init__(self, found: Found, more: Callable[[], bytes]) -> None:
        self.size = found.manifest.nbytes
        self._data, self._more = found.first, more

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See ``Source``."""
        for buffer in buffers:
            if offset + len(buffer) > len(self._data):
                self._data = self._more()
            part = self._data[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise CorruptEntry("a manifest ends before the entry's head; the entry is not used")
            buffer[:] = part
            offset += len(buffer)


def ends_s(ends_ms: int) -> float | None:
    """Unix time at which a key ends, by the server's clock, from an answer to PEXPIRETIME."""
    return None if ends_ms < 0 else ends_ms / 1000
