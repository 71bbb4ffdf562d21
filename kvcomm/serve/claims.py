"""One flight for each missing key among all clients: one computes, the others wait at most its lease."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcomm.errors import Overloaded
from kvcomm.store.base import Deadline

MAX_CLAIMS = 65536


@dataclass(frozen=True)
class _Claim:
    holder: str
    ends: float


class Claims:
    """Who computes which key. A claim ends when it is given back, when its key is put, or with its lease.

    They are kept in memory alone: after a restart two clients may compute the same, which costs time and no more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, _Claim] = {}
        self._changed = threading.Condition()

    def take(self, digest: str, lease_s: float) -> str | None:
        """The holder's name, 32 hex digits, if the claim is the caller's now; None while another holds it."""
        with self._changed:
            now = self._clock()
            found = self._held.get(digest)
            if found is not None and found.ends > now:
                return None
            if len(self._held) >= MAX_CLAIMS:
                self._held = {d: c for d, c in self._held.items() if c.ends > now}
                if len(self._held) >= MAX_CLAIMS:
                    raise Overloaded(f"{len(self._held)} keys are being computed, the limit; compute without a claim")
            claim = _Claim(secrets.token_hex(16), now + lease_s)
            self._held[digest] = claim
            return claim.holder

    def wait(self, digest: str, deadline: Deadline) -> bool:
        """Wait until nobody holds the claim, or until the deadline; whether it is free."""
        with self._changed:
            while True:
                found = self._held.get(digest)
                left = 0.0 if found is None else found.ends - self._clock()
                if left <= 0:
                    return True
                if not deadline.left():
                    return False
                self._changed.wait(min(left, deadline.left()))

    def give_back(self, digest: str, holder: str | None = None) -> bool:
        """End a claim, its holder's or (None) anybody's because the key was put; whether there was one."""
        with self._changed:
            found = self._held.get(digest)
            if found is None or holder not in (None, found.holder):
                return False
            del self._held[digest]
            self._changed.notify_all()
            return True

    def count(self) -> int:
        """Claims that run."""
        with self._changed:
            return sum(claim.ends > self._clock() for claim in self._held.values())
