"""A thin asyncio front: the same calls, run in a few threads, so that no call blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from kvcomm.keys import CacheKey
from kvcomm.store.base import DEFAULT_LEASE_S, Entry, Handle, Receipt, Store
from kvcomm.store.blobs import DEFAULT_DEADLINE_S
from kvcomm.types import Namespace, Segment, SegmentKV

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStore:
    """Awaitable calls on ``store``, which stays the caller's to close. At most ``threads`` run at once."""

    def __init__(self, store: Store, threads: int = 4) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvcomm-store")

    async def put(self, key: CacheKey, entry: Entry, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Receipt:
        """As ``Store.put``."""
        return await self._run(self.store.put, key, entry, deadline_s=deadline_s)

    async def get(
        self, key: CacheKey, *, lease_s: float = DEFAULT_LEASE_S, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Handle | None:
        """As ``Store.get``."""
        return await self._run(self.store.get, key, lease_s=lease_s, deadline_s=deadline_s)

    async def get_into(
        self, key: CacheKey, out: SegmentKV, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Segment | None:
        """As ``Store.get_into``."""
        return await self._run(self.store.get_into, key, out, deadline_s=deadline_s)

    async def contains(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        """As ``Store.contains``."""
        return await self._run(self.store.contains, key, deadline_s=deadline_s)

    async def delete(self, key: CacheKey, *, deadline_s: float = DEFAULT_DEADLINE_S) -> bool:
        """As ``Store.delete``."""
        return await self._run(self.store.delete, key, deadline_s=deadline_s)

    async def delete_group(self, namespace: Namespace, group: str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """As ``Store.delete_group``."""
        return await self._run(self.store.delete_group, namespace, group, deadline_s=deadline_s)

    async def delete_namespace(self, namespace: Namespace, *, deadline_s: float = DEFAULT_DEADLINE_S) -> int:
        """As ``Store.delete_namespace``."""
        return await self._run(self.store.delete_namespace, namespace, deadline_s=deadline_s)

    async def flush(self, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """As ``Store.flush``."""
        await self._run(self.store.flush, deadline_s=deadline_s)

    async def close(self) -> None:
        """End the threads, not the store."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)

    async def _run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **options))
