"""Entries of KV in tiers: memory, disk, and stores made of stores. Start at ``base.py``, then docs/store.md."""

from kvcomm.store.base import (
    Attributes,
    Entry,
    Handle,
    Listing,
    Priority,
    Receipt,
    Store,
    StoreStats,
    empty_kv,
)
from kvcomm.store.blobs import Blobs
from kvcomm.store.disk import DiskStore
from kvcomm.store.eviction import FrequencyRecency, LeastRecentlyUsed, Policy, Quota
from kvcomm.store.memory import MemoryStore
from kvcomm.store.seal import Keyring

__all__ = [
    "Attributes",
    "Blobs",
    "DiskStore",
    "Entry",
    "FrequencyRecency",
    "Handle",
    "Keyring",
    "LeastRecentlyUsed",
    "Listing",
    "MemoryStore",
    "Policy",
    "Priority",
    "Quota",
    "Receipt",
    "Store",
    "StoreStats",
    "empty_kv",
]
