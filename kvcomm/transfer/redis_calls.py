"""Calls to Redis: a deadline for each, few retries, and typed errors. Imports redis-py: import this module late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from redis import exceptions

from kvcomm.errors import AccessDenied, StoreError, StoreFull, StoreUnavailable
from kvcomm.store.base import Deadline
from kvcomm.transfer.redis_connection import Server, Watch, connect

T = TypeVar("T")
ATTEMPTS = 3
FIRST_PAUSE_S = 0.02
SCAN_COUNT = 1000
_PASSING = (
    exceptions.ConnectionError, exceptions.ClusterDownError, exceptions.TryAgainError, exceptions.SlotNotCoveredError,
)  # fmt: skip
_LASTING = (exceptions.AuthenticationError, exceptions.AuthorizationError)

# Takes a key away if it still starts with the bytes that were seen; a replacement is left alone.
_REMOVE_IF = """
if redis.call('GETRANGE', KEYS[1], 0, #ARGV[1] - 1) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0
"""
# Replaces a key if it still starts with the bytes that were seen, or is still not there.
_SET_IF = """
if ARGV[1] == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
elseif redis.call('GETRANGE', KEYS[1], 0, #ARGV[1] - 1) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


class Calls:
    """One server, or cluster, as this store's threads call it. Every call may be sent twice; what is sent bears it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._watch = Watch()
        self._client: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, what: str, call: Callable[[Any], T], deadline: Deadline) -> T:
        """``call(client)``; after a lost connection again, at most ``ATTEMPTS`` times in all.

        Raises:
            StoreFull: the server refuses for want of memory.
            AccessDenied: it knows the user not, or does not let it.
            DeadlineExceeded: no answer until the deadline.
            StoreUnavailable: not reachable, loading, closed, or any other refusal.
        """
        pause = FIRST_PAUSE_S
        for attempt in range(ATTEMPTS):
            self._watch.deadline = deadline
            try:
                return call(self._open())
            except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
                passing = isinstance(error, _PASSING) and not isinstance(error, _LASTING)
                if not passing or attempt == ATTEMPTS - 1 or deadline.left() <= pause:
                    raise refusal(error, what, deadline) from error
            finally:
                self._watch.deadline = None
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def batch(self, what: str, commands: Iterable[tuple[object, ...]], deadline: Deadline) -> list[Any]:
        """Answers to ``commands``, which are sent together; a refusal of one raises. Errors as for ``run``."""
        answers = self.try_batch(what, commands, deadline)
        for answer in answers:
            if isinstance(answer, Exception):
                raise refusal(answer, what, deadline) from answer
        return answers

    def try_batch(self, what: str, commands: Iterable[tuple[object, ...]], deadline: Deadline) -> list[Any]:
        """As ``batch``, with what was refused as an exception in its place."""
        listed = list(commands)

        def call(client: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for command in listed:
                pipe.execute_command(*command)
            return list(pipe.execute(raise_on_error=False))

        return self.run(what, call, deadline) if listed else []

    def remove_if(self, key: str, start: bytes, deadline: Deadline) -> bool:
        """Remove ``key`` if its value starts with ``start``."""
        return bool(self.run("removing", lambda c: c.eval(_REMOVE_IF, 1, key, start), deadline))

    def set_if(self, key: str, start: bytes, value: bytes, deadline: Deadline) -> bool:
        """Set ``key`` if its value starts with ``start``, or, with an empty ``start``, if it is not there."""
        return bool(self.run("replacing", lambda c: c.eval(_SET_IF, 1, key, start, value), deadline))

    def scan(self, pattern: str, deadline: Deadline) -> Iterator[list[str]]:
        """Names of keys that match, in pieces; those there throughout come at least once."""
        names = self.run(
            "listing", lambda c: [n.decode() for n in c.scan_iter(match=pattern, count=SCAN_COUNT)], deadline
        )
        unique = list(dict.fromkeys(names))
        for start in range(0, len(unique), SCAN_COUNT):
            yield unique[start : start + SCAN_COUNT]

    def close(self) -> None:
        """Let go of all connections; later calls raise StoreUnavailable."""
        with self._lock:
            self._closed, client, self._client = True, self._client, None
        if client is not None:
            client.close()

    def _open(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed; open a new one")
            if self._client is None:
                self._client = connect(self._server, self._watch)
            return self._client


def refusal(error: Exception, what: str, deadline: Deadline) -> StoreError:
    """The typed error for one of redis-py's or the system's; it names no key and no value."""
    told = str(error)[:200]
    if isinstance(error, exceptions.OutOfMemoryError) or told.startswith("OOM"):
        return StoreFull(f"{what}: Redis is at its maxmemory and evicts nothing; raise it or choose allkeys-lru")
    if isinstance(error, _LASTING) or isinstance(error, exceptions.NoPermissionError):
        return AccessDenied(f"{what}: Redis refuses this user ({told}); see the ACL rule in docs/redis.md")
    if isinstance(error, exceptions.TimeoutError | TimeoutError) or deadline.left() <= 0:
        return deadline.error(f"{what} in Redis")
    return StoreUnavailable(f"{what}: Redis does not answer ({type(error).__name__}: {told}); is it running?")
