"""Mooncake's client behind deadlines: each call runs on another thread, its codes become errors of this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol, TypeVar

import torch

from kvcomm.errors import StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.mooncake_config import MooncakeConfig, Placing
from kvcomm.transfer.mooncake_staging import Loan, Slots

T = TypeVar("T")
SMALL_BYTES = 4096
_SMALLS = 64
_REMOVE_AT_ONCE = 512
NO_SPACE, NOT_READY, MISSING, LEASE_EXPIRED = -200, -703, -704, -707
_MEANINGS = {
    -1: "the client is not connected", NO_SPACE: "no space", -600: "invalid parameters", -800: "the transfer failed",
    -900: "the master does not answer", LEASE_EXPIRED: "the lease ended during the read",
}  # fmt: skip
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5


class PartMissing(Exception):
    """An object is not in the cluster: never put, evicted, or lost with its node. For the store, a miss."""


class Client(Protocol):
    """What is used of ``mooncake.store.MooncakeDistributedStore``; codes below 0 are failures."""

    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def put(self, key: str, value: bytes, config: object) -> int: ...
    def upsert(self, key: str, value: bytes, config: object) -> int: ...
    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], config: object) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def close(self) -> int: ...


class MooncakeEngine:
    """One connected client and its registered memory. Thread-safe.

    Raises:
        StoreUnavailable: the package is not installed, or the master cannot be reached.
        DeadlineExceeded: connecting took too long.
    """

    def __init__(self, config: MooncakeConfig, deadline: Deadline) -> None:
        try:
            from mooncake import store as library
        except ImportError as error:
            raise StoreUnavailable(
                f"Mooncake does not load ({error}); install kvcomm[mooncake] and Debian's libibverbs1 libnuma1 libcurl4"
            ) from error
        self._library = library
        self._config = config
        self._client: Client = library.MooncakeDistributedStore()
        self._threads = ThreadPoolExecutor(config.threads, "mooncake")
        self._memory = torch.zeros(SMALL_BYTES * _SMALLS + config.staging_bytes, dtype=torch.uint8)
        self.smalls = Slots(self._memory[: SMALL_BYTES * _SMALLS], SMALL_BYTES)
        self.parts = Slots(self._memory[SMALL_BYTES * _SMALLS :], config.part_bytes)
        try:
            code = self._run("connecting to Mooncake", deadline, self._connect)
            if code != 0:
                raise failed(f"connecting to the master at {config.master}", code)
        except BaseException:
            self.close()
            raise

    def put_parts(self, names: Sequence[str], loan: Loan, sizes: Sequence[int], placing: Placing, group: str,
                  deadline: Deadline) -> None:  # fmt: skip
        """Put the loan's first slots as objects. No space is tried again, with back-off, until the deadline.

        Raises:
            StoreUnavailable: no space until the deadline, or the cluster fails; some objects may have been put.
        """
        todo, wait = list(range(len(names))), _FIRST_WAIT_S
        while True:
            codes = self._run(
                f"putting {len(todo)} parts", deadline, self._client.batch_put_from, [names[i] for i in todo],
                [loan.address(i) for i in todo], [sizes[i] for i in todo], self._how(placing, [group] * len(todo)),
                loan=loan,
            )  # fmt: skip
            for code in codes:
                if code not in (0, NO_SPACE):
                    raise failed("putting a part", code)
            todo = [i for i, code in zip(todo, codes, strict=True) if code]
            if not todo:
                return
            wait = _back_off(wait, deadline, "putting a part")

    def get_parts(self, names: Sequence[str], loan: Loan, sizes: Sequence[int], deadline: Deadline) -> None:
        """Read objects into the loan's first slots. A lease that ended during the read is tried again.

        Raises:
            PartMissing: one is not there, or has another size.
            StoreUnavailable: the cluster fails.
        """
        todo, wait = list(range(len(names))), _FIRST_WAIT_S
        while True:
            codes = self._run(
                f"reading {len(todo)} parts", deadline, self._client.batch_get_into, [names[i] for i in todo],
                [loan.address(i) for i in todo], [sizes[i] for i in todo], loan=loan,
            )  # fmt: skip
            for i, code in zip(todo, codes, strict=True):
                if code in (MISSING, NOT_READY) or 0 <= code != sizes[i]:
                    raise PartMissing
                if code < 0 and code != LEASE_EXPIRED:
                    raise failed("reading a part", code)
            todo = [i for i, code in zip(todo, codes, strict=True) if code < 0]
            if not todo:
                return
            wait = _back_off(wait, deadline, "reading a part")

    def put_small(self, name: str, data: bytes, placing: Placing, group: str, deadline: Deadline, *,
                  replace: bool = False) -> None:  # fmt: skip
        """Put at most 4,096 bytes. Without ``replace`` an object that is there stays as it is, and nothing says so."""
        wait, call = _FIRST_WAIT_S, self._client.upsert if replace else self._client.put
        while code := self._run("putting a manifest", deadline, call, name, data, self._how(placing, [group])):
            if code != NO_SPACE:
                raise failed("putting a manifest", code)
            wait = _back_off(wait, deadline, "putting a manifest")

    def get_small(self, name: str, deadline: Deadline) -> bytes | None:
        """An object of at most 4,096 bytes, or None."""
        with self.smalls.lend(1, deadline) as loan:
            while True:
                (code,) = self._run(
                    "reading a manifest", deadline, self._client.batch_get_into, [name], [loan.address(0)],
                    [SMALL_BYTES], loan=loan,
                )  # fmt: skip
                if code >= 0:
                    return bytes(loan.view(0)[:code])
                if code in (MISSING, NOT_READY):
                    return None
                if code != LEASE_EXPIRED:
                    raise failed("reading a manifest", code)

    def remove(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """Remove objects, leased or not; which of them were there."""
        gone: list[bool] = []
        for start in range(0, len(names), _REMOVE_AT_ONCE):
            some = list(names[start : start + _REMOVE_AT_ONCE])
            codes = self._run("removing objects", deadline, self._client.batch_remove, some, True)
            for code in codes:
                if code not in (0, MISSING, NOT_READY):
                    raise failed("removing objects", code)
                gone.append(code == 0)
        return gone

    def close(self) -> None:
        """Disconnect. A call that hangs keeps its thread and the memory until it returns.

        After a fail-over with etcd Mooncake's own close takes half a minute and holds the interpreter all that time,
        so no deadline can be put on it from here.
        """
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _connect(self) -> int:
        c = self._config
        code: int = self._library.MooncakeDistributedStore.setup(
            self._client, c.hostname, c.metadata, c.segment_bytes, c.local_bytes, c.protocol, c.devices, c.master,
            tenant_id=c.tenant,
        )  # fmt: skip
        return code or self._client.register_buffer(self._memory.data_ptr(), self._memory.numel())

    def _how(self, placing: Placing, groups: list[str]) -> object:
        how = self._library.ReplicateConfig()
        how.replica_num, how.nof_replica_num = placing.replicas, placing.nof_replicas
        how.with_hard_pin, how.group_ids = placing.hard_pin, groups
        if placing.soft_pin:
            how.soft_pin_action = self._library.SoftPinAction.ENABLE
            if placing.soft_pin_s is not None:
                how.soft_pin_ttl_ms = int(placing.soft_pin_s * 1000)
        return how

    def _run(
        self, what: str, deadline: Deadline, call: Callable[..., T], *given: object, loan: Loan | None = None
    ) -> T:
        if not deadline.left():
            raise deadline.error(what)
        try:
            future: Future[T] = self._threads.submit(call, *given)
        except RuntimeError as error:
            raise StoreUnavailable(f"{what}: the store was closed; open a new one") from error
        if loan is not None:
            loan.watch(future)  # type: ignore[arg-type]
        try:
            return future.result(deadline.left())
        except NotYet:
            future.cancel()
            raise deadline.error(what) from None


def failed(what: str, code: int) -> StoreUnavailable:
    """The error for one of Mooncake's codes."""
    return StoreUnavailable(f"{what} failed with Mooncake's code {code} ({_MEANINGS.get(code, 'see its error codes')})")


def _back_off(wait_s: float, deadline: Deadline, what: str) -> float:
    """Wait, and how long to wait the next time."""
    if deadline.left() <= wait_s:
        raise StoreUnavailable(f"{what}: no room until deadline_s={deadline.seconds}; add nodes, or put less")
    time.sleep(wait_s)
    return min(2 * wait_s, _LONGEST_WAIT_S)
