"""What a MooncakeStore is told: where the cluster is, how values are cut, how each priority class is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcomm.errors import InvalidInput
from kvcomm.store.base import Priority

MIN_PART_BYTES = 4 << 20
MAX_PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Placing:
    """How Mooncake keeps the objects of one priority class; the fields of its ``ReplicateConfig``.

    Attributes:
        replicas: copies in memory, on different nodes. Fewer where there are fewer nodes: Mooncake does not say so.
        soft_pin: evicted only after everything that is not pinned, for ``soft_pin_s`` after its last use.
        soft_pin_s: None for the master's own time (30 minutes unless it was started with another).
        hard_pin: never evicted. What a process leaves half put when it dies then stays until the master ends.
        nof_replicas: copies on NVMe-oF targets that the cluster has mounted.
    """

    replicas: int = 1
    soft_pin: bool = False
    soft_pin_s: float | None = None
    hard_pin: bool = False
    nof_replicas: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= 16 or not 0 <= self.nof_replicas <= 16:
            raise InvalidInput(f"{self.replicas} replicas, {self.nof_replicas} on NVMe-oF are outside 1 to 16, 0 to 16")
        if self.soft_pin_s is not None and not (self.soft_pin and 0 < self.soft_pin_s <= 86400):
            raise InvalidInput(f"soft_pin_s {self.soft_pin_s} needs soft_pin and 0 to 86400 seconds; leave it None")


PLACING: Mapping[Priority, Placing] = {
    Priority.HISTORY: Placing(),
    Priority.SHARED: Placing(),
    Priority.TOOL: Placing(soft_pin=True),
    Priority.SYSTEM: Placing(replicas=2, soft_pin=True),
}


@dataclass(frozen=True)
class MooncakeConfig:
    """One client of a Mooncake cluster. Fields that name hardware are handed to Mooncake as they are.

    Attributes:
        master: ``host:port``, or ``etcd://host:port;host:port`` where masters run in high availability.
        hostname: this host as other nodes reach it, ``host`` or ``host:port``.
        metadata: ``P2PHANDSHAKE``, or the URL of a metadata server.
        protocol: ``tcp``, ``rdma``, or what else the installed build knows.
        devices: RDMA devices, ``mlx5_0,mlx5_1``; empty for tcp.
        segment_bytes: memory that this process gives to the cluster; 0 for a client only.
        local_bytes: Mooncake's own buffer for small objects.
        staging_bytes: registered, pre-faulted memory that values go through; split into parts.
        part_bytes: largest object, 4 to 16 MiB; a value is cut into such parts.
        threads: calls that may run at once; one that hangs holds a thread and its staging until it returns.
        tenant: Mooncake's tenant, for its quotas. It is believed, not checked: no isolation.
        prefix: of all object names, for two stores in one cluster.
        placing: by priority class.
    """

    master: str = "127.0.0.1:50051"
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    local_bytes: int = 16 << 20
    staging_bytes: int = 128 << 20
    part_bytes: int = MIN_PART_BYTES
    threads: int = 8
    tenant: str = "default"
    prefix: str = "kvcomm/"
    placing: Mapping[Priority, Placing] = field(default_factory=lambda: dict(PLACING))

    def __post_init__(self) -> None:
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise InvalidInput(f"part_bytes {self.part_bytes} is outside {MIN_PART_BYTES} to {MAX_PART_BYTES}")
        if self.staging_bytes < self.part_bytes:
            raise InvalidInput(f"staging_bytes {self.staging_bytes} holds no part of {self.part_bytes}; raise it")
        if not 1 <= self.threads <= 256 or self.segment_bytes < 0 or self.local_bytes < 1 << 20:
            raise InvalidInput(
                f"threads {self.threads}, segment_bytes {self.segment_bytes} or local_bytes {self.local_bytes} is "
                "outside 1 to 256, 0 and more, 1 MiB and more"
            )
        if not self.master or not self.hostname:
            raise InvalidInput("master or hostname is empty; pass host:port and this host's name")
        if set(self.placing) != set(Priority):
            raise InvalidInput(f"placing names {sorted(self.placing)}; give one Placing for each Priority")
