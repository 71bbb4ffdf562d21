"""Entries of KV in tiers: memory, disk, and stores made of stores. Start at ``base.py``, then docs/store.md."""

from kvcomm.store.aio import AsyncStore
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
from kvcomm.store.placement import Placement, Places, Promotion, Selective, WriteBack, WriteThrough
from kvcomm.store.seal import Keyring
from kvcomm.store.shared import shared_memory_store
from kvcomm.store.tiered import TieredStore

__all__ = [
    "AsyncStore",
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
    "Placement",
    "Places",
    "Policy",
    "Priority",
    "Promotion",
    "Quota",
    "Receipt",
    "Selective",
    "Store",
    "StoreStats",
    "TieredStore",
    "WriteBack",
    "WriteThrough",
    "empty_kv",
    "shared_memory_store",
]
