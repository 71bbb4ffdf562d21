"""A tier in memory that the processes of one host share: the disk tier's files in /dev/shm, without fsync.

Locks, pins, limits, checksums and recovery are the disk tier's. It survives processes, not the host.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvcomm.errors import InvalidInput
from kvcomm.store.disk import DiskStore
from kvcomm.store.eviction import UNLIMITED, Policy, Quota
from kvcomm.store.seal import Keyring
from kvcomm.types import Namespace

SHARED_ROOT = Path("/dev/shm")


def shared_memory_store(
    name: str, max_bytes: int, *, max_entries: int = UNLIMITED, quota: Quota | None = None,
    policy: Policy | None = None, keyring: Keyring | None = None, root: Path = SHARED_ROOT,
) -> DiskStore:  # fmt: skip
    """The store of that name among this user's processes; the first to open makes it.

    Raises:
        InvalidInput: the name is not one path component, or /dev/shm is not there.
        StoreUnavailable: the folder belongs to another user, or fails.
    """
    Namespace(name)
    if not root.is_dir():
        raise InvalidInput(f"{root} is no folder; pass root= of a tmpfs, or use MemoryStore")
    folder = root / f"kvcomm-{os.getuid()}" / name
    return DiskStore(
        folder, max_bytes=max_bytes, max_entries=max_entries, quota=quota, policy=policy, keyring=keyring,
        durable=False, name="shared",
    )  # fmt: skip
