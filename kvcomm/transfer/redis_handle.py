"""An entry in Redis that was found: its parts are read as they are asked for. Nothing is held on the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcomm.errors import CorruptEntry, StoreUnavailable
from kvcomm.store.base import Deadline, Handle
from kvcomm.store.codec import EntryReader
from kvcomm.transfer.redis_lookup import Parts
from kvcomm.transfer.redis_value import PartGone, RedisSource
from kvcomm.types import Segment, SegmentKV


class RedisHandle(Handle):
    """Made by ``RedisStore.get``. Redis may evict or forget the entry all the same: a read then raises.

    Args:
        parts: what ``source`` reads with; its deadline is set for each read.
        on_bad: told why the entry is of no use any more: it is corrupt, or a part of it is gone.
    """

    def __init__(
        self, reader: EntryReader, segment: Segment, source: RedisSource, parts: Parts, expires_s: float | None,
        deadline_s: float, on_bad: Callable[[CorruptEntry | PartGone], None],
    ) -> None:  # fmt: skip
        head = reader.head
        self.key, self.segment, self.attributes, self.encoding = head.key, segment, head.attributes, head.encoding
        self.nbytes, self.expires_s = reader.nbytes, expires_s
        self._reader, self._source, self._deadline_s = reader, source, deadline_s
        self._parts, self._on_bad = parts, on_bad
        self._using = threading.Lock()
        self._released = False

    def layer_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        with self._reading(Deadline(self._deadline_s)):
            self._reader.layer_into(layer, keys, values)

    def read_into(self, out: SegmentKV) -> None:
        self.read_before(out, Deadline(self._deadline_s))

    def read_before(self, out: SegmentKV, deadline: Deadline) -> None:
        """As ``read_into``, with a deadline for all of it."""
        out.check(self.key.fingerprint, len(self.segment))
        with self._reading(deadline):
            self._source.whole = True
            try:
                self._reader.read_into(out)
            finally:
                self._source.whole = False
                self._source.forget()

    @contextmanager
    def _reading(self, deadline: Deadline) -> Iterator[None]:
        with self._using:
            if self._released:
                raise StoreUnavailable(f"the handle of {self.key} was released; get it again")
            self._parts.deadline = deadline
            try:
                yield
            except (CorruptEntry, PartGone) as error:
                self._on_bad(error)
                raise

    def release(self) -> None:
        with self._using:
            self._released = True
