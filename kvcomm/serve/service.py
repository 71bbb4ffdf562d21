"""A whole service from its settings: folder, limits, where it listens. What the command and the tests start."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kvcomm
from kvcomm.serve.admission import Admission
from kvcomm.serve.calls_service import HEALTH_NAMESPACE, check_health
from kvcomm.serve.core import Authenticate, Core, Done
from kvcomm.serve.drops import Drops
from kvcomm.serve.learned import LearnedSums
from kvcomm.serve.log import logged
from kvcomm.serve.server import MAX_CONNECTIONS, Server
from kvcomm.serve.session import Session
from kvcomm.serve.status import Held, Snapshot, TierState, snapshot
from kvcomm.serve.tally import Tally
from kvcomm.serve.uploads import Uploads
from kvcomm.store.disk import DiskStore
from kvcomm.store.eviction import UNLIMITED, Quota
from kvcomm.store.seal import Keyring
from kvcomm.transfer.auth import Grant, local_grant

STATE_FILE, LEARNED_FOLDER = "service.sqlite", "learned"
MAX_DRAFT_BYTES = 256 << 20


@dataclass(frozen=True)
class Settings:
    """How much a service keeps and does.

    Attributes:
        folder: where entries, blobs and the list of drops lie; state survives in it. In /dev/shm it is as fast as
            memory and survives the service, not the machine.
        max_bytes: of entries, all namespaces together; ``namespace_bytes`` of each.
        upload_bytes: memory for values on their way in.
        durable: fsync what is acknowledged.
    """

    folder: Path
    max_bytes: int
    namespace_bytes: int = UNLIMITED
    upload_bytes: int = 1 << 30
    max_connections: int = MAX_CONNECTIONS
    slots: int = 16
    durable: bool = True


class Service:
    """A store, what connections share, and a server for the given sockets.

    Raises:
        InvalidInput, StoreUnavailable: the folder cannot be used.
    """

    def __init__(
        self, settings: Settings, listeners: Sequence[socket.socket], authenticate: Authenticate, *,
        tls: ssl.SSLContext | None = None, keyring: Keyring | None = None,
        holds: Callable[[Grant], bool] = lambda grant: True,
        on_admin: Callable[[str, Grant, dict[str, str | int]], None] = lambda act, grant, facts: None,
        on_denied: Callable[[str, str, str], None] = lambda who, namespace, call: None,
    ) -> None:  # fmt: skip
        self.tally = Tally()
        self.store = DiskStore(
            settings.folder, max_bytes=settings.max_bytes, quota=Quota(settings.namespace_bytes),
            durable=settings.durable, keyring=keyring, name="service", max_handles=4 * settings.max_connections,
            draft_bytes=min(settings.upload_bytes // 4, MAX_DRAFT_BYTES),
        )  # fmt: skip
        self.core = Core(
            self.store, authenticate, Uploads(settings.upload_bytes, drafts=self.store.drafts),
            Drops(settings.folder / STATE_FILE), LearnedSums(settings.folder / LEARNED_FOLDER, keyring),
            admission=Admission(settings.slots), holds=holds, on_done=self._done, on_admin=on_admin,
            on_denied=on_denied,
        )  # fmt: skip
        self.address = ", ".join(address_of(listener) for listener in listeners)
        self.healthy = False
        self.server = Server(
            lambda wire: Session(self.core, wire), listeners, tls=tls, max_connections=settings.max_connections
        )

    def start(self) -> None:
        """Check that the store puts and gets, then begin to accept. Raises StoreError."""
        self.health()
        self.server.start()

    def snapshot(self) -> Snapshot:
        """What the status page and the metrics show."""
        usage = {(name, "disk"): (used.entries, used.nbytes) for name, used in self.store.usage().items()}
        usage.pop((HEALTH_NAMESPACE.name, "disk"), None)
        stats = self.store.stats()
        held = Held([TierState("disk", stats.nbytes, stats.max_bytes, stats.entries)], usage, self.server.leases,
                    self.server.connections)  # fmt: skip
        return snapshot(self.tally, held, version=kvcomm.__version__, address=self.address, healthy=self.healthy)

    def health(self) -> bool:
        """Whether a put and a get go well. Raises StoreError."""
        self.healthy = False
        check_health(self.store, 10.0)
        self.healthy = True
        return True

    def _done(self, done: Done) -> None:
        logged(done)
        self.tally.record(done.call, done.namespace, done.outcome, done.seconds, done.received, done.sent)

    def stop(self, grace_s: float = 5.0) -> None:
        """Let calls that run end, then close everything."""
        self.core.drops.close()
        self.core.changes.close()
        self.server.stop(grace_s)
        self.core.learned.close()
        self.core.uploads.close()
        self.store.close()


def local_door(token: bytes) -> Grant:
    """Who is let in where a service has no tokens, on a private socket: everybody, to the namespace that he names."""
    return local_grant(token.decode("utf-8", "replace") or "default")


def address_of(listener: socket.socket) -> str:
    """Where a socket listens, as a client writes it."""
    found = listener.getsockname()
    if not isinstance(found, tuple):
        return f"unix:{found}"
    return f"[{found[0]}]:{found[1]}" if ":" in str(found[0]) else f"{found[0]}:{found[1]}"
