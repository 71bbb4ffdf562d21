"""Where entries go when they are put, and when they move up: small values with one function each."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcomm.errors import InvalidInput
from kvcomm.store.base import Attributes, Priority
from kvcomm.types import Namespace

_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class Places:
    """Tiers, 0 the fastest: written before put returns, and written behind."""

    now: tuple[int, ...]
    later: tuple[int, ...] = ()


class Placement(Protocol):
    """Decides into which tiers a new entry goes."""

    def places(self, namespace: Namespace, attributes: Attributes, tiers: int) -> Places:
        """Places among ``tiers`` tiers; ``now`` has at least one."""
        ...


@dataclass(frozen=True)
class WriteThrough:
    """Every tier, before put returns: what is acknowledged is durable."""

    def places(self, namespace: Namespace, attributes: Attributes, tiers: int) -> Places:
        return Places(tuple(range(tiers)))


@dataclass(frozen=True)
class WriteBack:
    """The fastest tier now, the rest behind. What is lost with the process is what the receipt did not call durable."""

    def places(self, namespace: Namespace, attributes: Attributes, tiers: int) -> Places:
        return Places((0,), tuple(range(1, tiers)))


@dataclass(frozen=True)
class Selective:
    """The classes in ``through`` go to every tier at once; others start in the fastest and go down when evicted."""

    through: frozenset[Priority] = frozenset({Priority.SYSTEM, Priority.TOOL})

    def places(self, namespace: Namespace, attributes: Attributes, tiers: int) -> Places:
        return Places(tuple(range(tiers))) if attributes.priority in self.through else Places((0,))


@dataclass(frozen=True)
class Promotion:
    """Move up after ``min_hits`` hits within ``window_s`` seconds; the classes in ``always`` at the first hit.

    Raises:
        InvalidInput: ``min_hits`` or ``window_s`` is not positive.
    """

    min_hits: int = 2
    window_s: float = 600.0
    always: frozenset[Priority] = frozenset({Priority.SYSTEM, Priority.TOOL})

    def __post_init__(self) -> None:
        if self.min_hits < 1 or not self.window_s > 0:
            raise InvalidInput(f"min_hits {self.min_hits} and window_s {self.window_s} must be positive; raise them")


class HitCounter:
    """Recent hits of the last 65,536 names, for a ``Promotion``. Thread-safe."""

    def __init__(self, promotion: Promotion, clock: Callable[[], float] = time.monotonic) -> None:
        self._promotion = promotion
        self._clock = clock
        self._hits: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._lock = threading.Lock()

    def hit(self, name: str, priority: Priority) -> bool:
        """Count a hit; whether the entry should move up."""
        if priority in self._promotion.always:
            return True
        with self._lock:
            now = self._clock()
            last, count = self._hits.pop(name, (now, 0))
            count = count + 1 if now - last <= self._promotion.window_s else 1
            if count >= self._promotion.min_hits:
                return True
            self._hits[name] = (now, count)
            while len(self._hits) > _REMEMBERED:
                self._hits.popitem(last=False)
            return False
