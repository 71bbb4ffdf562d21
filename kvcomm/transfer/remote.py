"""The remote tier: a Store whose entries lie in an anchor service, shared with other processes and machines."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from kvcomm.errors import AccessDenied, KVCommError, ProtocolError, StoreError, StoreUnavailable
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
from kvcomm.store.blobs import DEFAULT_DEADLINE_S
from kvcomm.store.coordinator import DEFAULT_TERMS, Terms
from kvcomm.store.tally import Tally
from kvcomm.transfer.address import Address
from kvcomm.transfer.breaker import Breaker
from kvcomm.transfer.client import Client
from kvcomm.transfer.coordinate import RemoteCoordinator
from kvcomm.transfer.handle import RemoteHandle, open_entry
from kvcomm.transfer.names import MAX_NBYTES, fingerprint_text, key_text, look_ups, milliseconds, read_listings
from kvcomm.transfer.remote_blobs import RemoteBlobs
from kvcomm.transfer.upload import put_entry
from kvcomm.transfer.watch import Watches
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

_COUNT = 2**53


class RemoteStore(Store):
    """A service's entries. Making one contacts the service once, for at most a second, and bears that it is not there.

    Args:
        address: ``unix:/path`` or ``host:port``.
        tokens: a token for each namespace that is used. None for a service without tokens, which believes a client
            its namespace.
        tls: the client's context, for a service with TLS.
        terms: how long an engine on this store waits for the service and for other nodes.
        node: this node's name where learned offsets are merged; the host's unless given.
        on_drop: called with (namespace, group) when anybody drops a group, with the empty group for everything. Those
            namespaces are watched that this store has used.

    ``entries()`` and ``stats()`` without a namespace tell of those in ``tokens``, or else of those used so far.
    """

    def __init__(
        self, address: str | Address, *, tokens: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None,
        on_drop: Sequence[Callable[[Namespace, str], None]] = (), breaker: Breaker | None = None, name: str = "remote",
        terms: Terms = DEFAULT_TERMS, node: str = "",
    ) -> None:  # fmt: skip
        self.name = name
        self._address = address if isinstance(address, Address) else Address.parse(address)
        self._tokens = None if tokens is None else dict(tokens)
        self._tls, self._breaker = tls, breaker or Breaker()
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._tally = Tally()
        self._watches = Watches(on_drop)
        self.blobs = RemoteBlobs(self._client)
        self.coordinator = self._meeting = RemoteCoordinator(self._client, terms, node)
        for namespace in self._tokens or ():
            self._client(Namespace(namespace))
        self.durable = self._find_durable()

    def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        entry.check(key)
        receipt = put_entry(self._client(key.namespace), key, entry, Deadline(deadline_s))
        self._tally.add(key.namespace.name, "puts" if receipt.stored else "existed")
        return receipt

    def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        return self._open(key, check_lease(lease_s), Deadline(deadline_s))

    def get_into(self, key: CacheKey, out: SegmentKV, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Segment | None:
        deadline = Deadline(deadline_s)
        for attempt in (1, 2):
            handle = self._open(key, DEFAULT_LEASE_S, deadline)
            if handle is None:
                return None
            try:
                with handle:
                    handle.read_before(out, deadline)
                    return handle.segment
            except StoreUnavailable:
                if attempt == 2 or not deadline.left():
                    raise
        return None

    def get_or_compute(
        self, key: CacheKey, compute: Callable[[], Entry], *, lease_s: float = DEFAULT_LEASE_S,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Handle:  # fmt: skip
        """The entry; on a miss one of all clients computes and puts it while the others wait, at most ``lease_s``.

        Raises:
            StoreUnavailable: the service cannot be asked, or the entry was computed and could not be kept.
        """
        client, deadline = self._client(key.namespace), Deadline(deadline_s)
        named = {"key": key_text(key)}
        while True:
            handle = self.get(key, lease_s=lease_s, deadline_s=max(deadline.left(), 0.001))
            if handle is not None:
                return handle
            lease_ms = milliseconds(check_lease(lease_s))
            waits = milliseconds(min(lease_s, max(deadline.left() / 2, 0.001)))
            found = client.call({"call": "claim", **named, "lease_ms": lease_ms, "wait_ms": waits}, deadline)
            holder = found.header.text("holder", 32)
            if holder:
                try:
                    self.put(key, compute(), deadline_s=max(deadline.left(), 0.001))
                except BaseException:
                    with suppress(StoreError):
                        client.call({"call": "unclaim", **named, "holder": holder}, Deadline(1.0))
                    raise
            if not deadline.left():
                raise deadline.error(f"computing {key}")

    def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        return self._found(key, {"call": "contains"}, deadline_s)

    def contains_many(self, keys: Sequence[CacheKey], *, deadline_s: float = DEFAULT_DEADLINE_S) -> list[bool]:
        """As ``Store.contains_many``; up to 256 keys of a namespace are one call."""
        deadline, found = Deadline(deadline_s), dict.fromkeys(keys, False)
        by_namespace: dict[Namespace, list[CacheKey]] = {}
        for key in found:
            by_namespace.setdefault(key.namespace, []).append(key)
        for namespace, asked in by_namespace.items():
            at = 0
            for count, page in look_ups(asked):
                answer = self._client(namespace).call({"call": "contains_many"}, deadline, [memoryview(page)])
                for place in answer.header.integers("found", 0, count - 1, count):
                    found[asked[at + place]] = True
                answer.header.end()
                at += count
        return [found[key] for key in keys]

    def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        return self._found(key, {"call": "delete"}, deadline_s)

    def touch(self, key: CacheKey, *, ttl_s: float | None = None, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        return self._found(key, {"call": "touch", "ttl_ms": milliseconds(ttl_s)}, deadline_s)

    def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        answer = self._client(namespace).call({"call": "delete_namespace"}, Deadline(deadline_s))
        return answer.header.integer("count", 0, _COUNT)

    def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        answer = self._client(namespace).call({"call": "delete_group", "group": group}, Deadline(deadline_s))
        return answer.header.integer("count", 0, _COUNT)

    def entries(
        self, namespace: Namespace | None = None, fingerprint: ModelFingerprint | None = None
    ) -> Iterator[Listing]:
        call: dict[str, object] = {"call": "entries", "chosen": fingerprint is not None}
        if fingerprint is not None:
            call["fingerprint"] = fingerprint_text(fingerprint)
        for client in self._chosen(namespace):
            answer = client.call(call, Deadline(DEFAULT_DEADLINE_S))
            now_s = answer.header.number("now_s")
            yield from read_listings(bytes(answer.payload), Namespace(client.namespace), now_s)

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        """Sizes as of the service. Counts are this store's own; those of all clients have ``service.`` before them."""
        clients = self._chosen(namespace)
        found = [self._stats(client, Deadline(DEFAULT_DEADLINE_S))[0] for client in clients]
        counters = self._tally.read(None if namespace is None else namespace.name)
        counters |= {"sent_bytes": sum(c.sent for c in clients), "received_bytes": sum(c.received for c in clients)}
        for one in found:
            for event, count in one.counters.items():
                counters[f"service.{event}"] = counters.get(f"service.{event}", 0) + count
        return StoreStats(
            self.name, sum(s.entries for s in found), sum(s.nbytes for s in found),
            max((s.max_bytes for s in found), default=0), max((s.max_entries for s in found), default=0), counters,
        )  # fmt: skip

    def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        for client in self._chosen(None):
            client.call({"call": "flush"}, Deadline(deadline_s))

    def health(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> float:
        """Seconds that a put and a get inside the service took. Raises StoreError if they did not go well."""
        answer = self._client(namespace).call({"call": "health"}, Deadline(deadline_s))
        return answer.header.number("put_and_get_ms") / 1000

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients = list(self._clients.values())
        self._watches.close()
        self._meeting.close()
        for client in clients:
            client.close()

    def _open(self, key: CacheKey, lease_s: float, deadline: Deadline) -> RemoteHandle | None:
        handle = open_entry(self._client(key.namespace), key, lease_s, deadline, self._suspect)
        self._tally.add(key.namespace.name, "misses" if handle is None else "hits")
        return handle

    def _client(self, namespace: Namespace) -> Client:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"store {self.name!r} is closed; open a new one")
            found = self._clients.get(namespace.name)
            if found is None:
                token = namespace.name if self._tokens is None else self._tokens.get(namespace.name)
                if token is None:
                    raise AccessDenied(f"there is no token for namespace {namespace}; pass one in tokens=")
                found = Client(self._address, namespace.name, token, tls=self._tls, breaker=self._breaker)
                self._clients[namespace.name] = found
                self._watches.add(found)
            return found

    def _chosen(self, namespace: Namespace | None) -> list[Client]:
        if namespace is not None:
            return [self._client(namespace)]
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"store {self.name!r} is closed; open a new one")
            return list(self._clients.values())

    def _found(self, key: CacheKey, call: dict[str, object], deadline_s: float) -> bool:
        client, deadline = self._client(key.namespace), Deadline(deadline_s)
        return client.call({**call, "key": key_text(key)}, deadline).header.truth("found")

    def _suspect(self, key: CacheKey) -> None:
        with suppress(StoreError):
            self._client(key.namespace).call(
                {"call": "suspect", "key": key_text(key)}, Deadline(self._meeting.terms.silence_s)
            )

    @staticmethod
    def _stats(client: Client, deadline: Deadline) -> tuple[StoreStats, bool]:
        found = client.call({"call": "stats"}, deadline).header
        counted = found.members("counters")
        stats = StoreStats(
            "service", found.integer("entries", 0, _COUNT), found.integer("nbytes", 0, MAX_NBYTES),
            found.integer("max_bytes", 0, 2**63), found.integer("max_entries", 0, 2**63), counted.integers_by_name(),
        )  # fmt: skip
        return stats, found.truth("durable")

    def _find_durable(self) -> bool:
        """Whether the service keeps durably what it acknowledges; False if it cannot be asked now."""
        tokens = self._tokens if self._tokens is not None else {"default": "default"}
        for namespace, token in tokens.items():
            client = Client(self._address, namespace, token, tls=self._tls)
            try:
                return self._stats(client, Deadline(1.0))[1]
            except (KVCommError, ProtocolError):
                continue
            finally:
                client.close()
        return False
