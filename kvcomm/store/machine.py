"""A Hypothesis state machine: any store, driven by random calls, against a dictionary. Needs hypothesis.

class Mine(StoreMachine):
    def make_store(self, folder): return MyStore(folder)

TestMine = Mine.TestCase
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcomm.errors import StoreUnavailable
from kvcomm.store.base import Attributes, Entry, Handle, Priority, Store
from kvcomm.store.testing import ONE, TWO, same, sample
from kvcomm.types import SegmentKV

_numbers = st.integers(0, 5)
_spaces = st.sampled_from([ONE, TWO])
_groups = st.sampled_from(["", "a", "b"])


class StoreMachine(RuleBasedStateMachine):
    """Give ``make_store``. The model knows for each key whether it must be there, may be there, or must not.

    Attributes:
        evicts: whether the store may drop entries by itself; then what was put may be there.
        reopens: whether entries must outlive close and ``make_store`` on the same folder.
    """

    evicts: ClassVar[bool] = False
    reopens: ClassVar[bool] = False

    def make_store(self, folder: Path) -> Store:
        """Open the store on ``folder``, which may hold what it held before."""
        raise NotImplementedError

    @initialize()
    def open(self) -> None:
        """Start with nothing."""
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.make_store(self.folder / "store")
        self.model: dict[tuple[str, int], str] = {}
        self.handles: list[tuple[Handle, int]] = []

    def teardown(self) -> None:
        """Remove what was made."""
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(number=_numbers, space=_spaces, group=_groups, priority=st.sampled_from(Priority))
    def put(self, number: int, space: object, group: str, priority: Priority) -> None:
        """Stored exactly when it was not there; where eviction happens that cannot be known."""
        key, entry = sample(number, namespace=space, attributes=Attributes(priority, group))  # type: ignore[arg-type]
        there = (str(space), number) in self.model
        try:
            receipt = self.store.put(key, entry, deadline_s=0.2)
        except StoreUnavailable:
            if not self.evicts:
                raise
            return
        if not self.evicts and receipt.stored == there:
            raise AssertionError(f"put said stored={receipt.stored} where the model says there={there}")
        if receipt.stored:
            self.model[str(space), number] = group

    @rule(number=_numbers, space=_spaces)
    def put_other_bytes(self, number: int, space: object) -> None:
        """A second put never changes what is there."""
        if (str(space), number) in self.model and not self.evicts:
            key, entry = sample(number, namespace=space)  # type: ignore[arg-type]
            changed = Entry(entry.segment, SegmentKV(entry.kv.keys + 1, entry.kv.values))
            if self.store.put(key, changed).stored:
                raise AssertionError("a second put was stored")

    @rule(number=_numbers, space=_spaces, keep=st.booleans())
    def get(self, number: int, space: object, keep: bool) -> None:
        """The bytes that were put, or None where nothing was."""
        key, entry = sample(number, namespace=space)  # type: ignore[arg-type]
        handle = self.store.get(key)
        there = (str(space), number) in self.model
        if handle is None:
            if there and not self.evicts:
                raise AssertionError(f"{key} was put and is gone")
            return
        if not there:
            raise AssertionError(f"{key} was never put, or deleted, and is there")
        if not same(handle.read(), entry.kv):
            raise AssertionError(f"{key} has other bytes")
        if keep and len(self.handles) < 2:
            self.handles.append((handle, number))
        else:
            handle.release()

    @rule()
    def read_and_release(self) -> None:
        """What is pinned stays readable and right, whatever happened since."""
        for handle, number in self.handles:
            if not same(handle.read(), sample(number)[1].kv):
                raise AssertionError("a pinned entry changed")
            handle.release()
        self.handles.clear()

    @rule(number=_numbers, space=_spaces)
    def delete(self, number: int, space: object) -> None:
        """Gone, and said whether it was there."""
        key, _ = sample(number, namespace=space)  # type: ignore[arg-type]
        there = self.model.pop((str(space), number), None) is not None
        said = self.store.delete(key)
        if said != there and not (self.evicts and there):
            raise AssertionError(f"delete said {said} where the model says {there}")

    @rule(space=_spaces, group=st.sampled_from(["a", "b"]))
    def drop_group(self, space: object, group: str) -> None:
        """All of a group go, and no other."""
        self.store.delete_group(space, group)  # type: ignore[arg-type]
        self.model = {k: g for k, g in self.model.items() if k[0] != str(space) or g != group}

    @rule(space=_spaces)
    def drop_namespace(self, space: object) -> None:
        """All of a namespace go, and no other."""
        self.store.delete_namespace(space)  # type: ignore[arg-type]
        self.model = {k: g for k, g in self.model.items() if k[0] != str(space)}

    @rule()
    def reopen(self) -> None:
        """Close and open again."""
        self.handles.clear()
        self.store.close()
        if not self.reopens:
            self.model.clear()
            shutil.rmtree(self.folder / "store", ignore_errors=True)
        self.store = self.make_store(self.folder / "store")

    @invariant()
    def listing_agrees(self) -> None:
        """What is listed was put; what was put is listed unless it may be evicted."""
        if not hasattr(self, "store"):
            return
        listed = {(str(e.key.namespace), e.key.content) for e in self.store.entries()}
        known = {(space, sample(number)[1].segment.digest) for space, number in self.model}
        if listed - known or (known - listed and not self.evicts):
            raise AssertionError(f"listed {len(listed)}, put {len(known)}, not the same")
