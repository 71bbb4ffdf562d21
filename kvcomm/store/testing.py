"""What a store must do, as tests to inherit: a new store's test file is twenty lines.

    class TestMine(StoreContract):
        def make_store(self, folder): return MyStore(folder)

``StoreMachine`` drives any store with random calls against a dictionary. Needs pytest and hypothesis.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from kvcomm.errors import InvalidInput, StoreUnavailable
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store.base import Attributes, Entry, Priority, Store, empty_kv
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

ONE = Namespace("one")
TWO = Namespace("two")


def fingerprint(n_layers: int = 2, n_kv_heads: int = 2, head_dim: int = 4, dtype: str = "float32") -> ModelFingerprint:
    """A model that does not exist."""
    return ModelFingerprint("Test", "w" * 64, "r" * 64, dtype, "", "t" * 64, n_layers, n_kv_heads, head_dim)


def sample(
    number: int,
    *,
    tokens: int = 3,
    namespace: Namespace = ONE,
    model: ModelFingerprint | None = None,
    attributes: Attributes | None = None,
) -> tuple[CacheKey, Entry]:
    """A key and its entry; the same number gives the same tokens and the same KV, in every namespace and process."""
    model = model or fingerprint()
    segment = Segment(tuple((number * 1009 + i) % 2**32 for i in range(tokens)))
    key = CacheKey.of(namespace, model, segment, Recipe("isolated", "", "neutral", False))
    generator = torch.Generator().manual_seed(number)
    shape = (model.n_layers, model.n_kv_heads, tokens, model.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(model.torch_dtype) for _ in range(2))
    return key, Entry(segment, SegmentKV(keys, values), attributes or Attributes())


def same(a: SegmentKV, b: SegmentKV) -> bool:
    """Whether two KVs are equal bit by bit."""
    pairs = ((a.keys, b.keys), (a.values, b.values))
    return all(x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def holds(
    store: Store, number: int, namespace: Namespace = ONE, tokens: int = 3, model: ModelFingerprint | None = None
) -> bool:
    """Whether ``sample(number)`` is held; an AssertionError if other bytes are."""
    key, entry = sample(number, namespace=namespace, tokens=tokens, model=model)
    handle = store.get(key)
    if handle is None:
        return False
    with handle:
        if handle.segment != entry.segment or not same(handle.read(), entry.kv):
            raise AssertionError(f"{store.name} gave other bytes than were put for {key}")
    return True


class StoreContract:
    """Inherit, and give ``make_store``. Set ``lossless`` to False for a store that keeps fewer bits."""

    lossless: ClassVar[bool] = True

    def make_store(self, folder: Path) -> Store:
        """A new, empty store with room for at least 1 MiB."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with self.make_store(tmp_path / "store") as store:
            yield store

    def test_put_then_get_is_bit_equal(self, store: Store) -> None:
        for number, tokens in enumerate((1, 3, 17, 63)):
            key, entry = sample(number, tokens=tokens)
            assert store.put(key, entry).stored
            handle = store.get(key)
            assert handle is not None
            with handle:
                assert (handle.key, handle.segment, handle.attributes) == (key, entry.segment, entry.attributes)
                assert not self.lossless or same(handle.read(), entry.kv)

    def test_special_floats_and_strides_survive(self, store: Store) -> None:
        key, entry = sample(0, tokens=4)
        entry.kv.keys[0, 0, 0] = torch.tensor([0.0, -0.0, 1e-45, 3e38])
        wide = torch.stack([entry.kv.keys, entry.kv.values], -1)
        store.put(key, Entry(entry.segment, SegmentKV(wide[..., 0], wide[..., 1])))
        out = empty_kv(key.fingerprint, 4)
        assert store.get_into(key, out) == entry.segment
        assert not self.lossless or same(out, entry.kv)

    def test_into_strided_destination(self, store: Store) -> None:
        key, entry = sample(0, tokens=5)
        store.put(key, entry)
        room = torch.full((2, 2, 2, 9, 4), float("nan"))
        assert store.get_into(key, SegmentKV(room[0, :, :, 2:7], room[1, :, :, 2:7])) == entry.segment
        assert not self.lossless or torch.equal(room[0, :, :, 2:7], entry.kv.keys)
        assert room[:, :, :, :2].isnan().all()
        assert room[:, :, :, 7:].isnan().all()

    def test_one_layer_alone(self, store: Store) -> None:
        key, entry = sample(1)
        store.put(key, entry)
        handle = store.get(key)
        assert handle is not None
        with handle:
            keys, values = torch.empty(2, 3, 4), torch.empty(2, 3, 4)
            handle.layer_into(1, keys, values)
            assert not self.lossless or torch.equal(keys, entry.kv.keys[1])
            for layer, wrong in ((2, keys), (-1, keys), (0, keys[:, :2]), (0, keys.double())):
                with pytest.raises(InvalidInput):
                    handle.layer_into(layer, wrong, values)

    def test_miss_is_none(self, store: Store) -> None:
        key, _ = sample(9)
        assert store.get(key) is None
        assert store.get_into(key, empty_kv(key.fingerprint, 3)) is None
        assert not store.contains(key)
        assert not store.delete(key)
        assert not store.touch(key)

    def test_many_are_looked_up_in_their_order(self, store: Store) -> None:
        """Of both namespaces, named twice, held or not; more than a service is asked for at once."""
        keys = [sample(n)[0] for n in range(300)]
        for number in (0, 7, 255, 256, 299):
            store.put(*sample(number))
        store.put(*sample(3, namespace=TWO))
        asked = [keys[3], sample(3, namespace=TWO)[0], *keys, keys[7]]
        assert store.contains_many(asked) == [store.contains(key) for key in asked]
        assert sum(store.contains_many(asked)) == 7
        assert store.contains_many([]) == []

    def test_first_put_wins_and_second_says_so(self, store: Store) -> None:
        key, entry = sample(0)
        assert store.put(key, entry).stored
        second = Entry(entry.segment, SegmentKV(entry.kv.keys + 1, entry.kv.values))
        assert not store.put(key, second).stored
        assert not self.lossless or holds(store, 0)

    def test_wrong_entry_is_refused(self, store: Store) -> None:
        (key, entry), (other, longer) = sample(0), sample(1, tokens=4)
        for bad in (longer, Entry(entry.segment, longer.kv), Entry(longer.segment, entry.kv)):
            with pytest.raises(InvalidInput):
                store.put(key, bad)
        with pytest.raises(InvalidInput):
            store.put(other, Entry(longer.segment, SegmentKV(longer.kv.keys.double(), longer.kv.values.double())))
        assert not store.contains(key)

    def test_delete(self, store: Store) -> None:
        key, entry = sample(0)
        store.put(key, entry)
        assert store.delete(key)
        assert store.get(key) is None
        assert store.put(key, entry).stored

    def test_namespaces_do_not_see_each_other(self, store: Store) -> None:
        (mine, entry), (theirs, _) = sample(0), sample(0, namespace=TWO)
        store.put(mine, entry)
        assert store.get(theirs) is None
        assert not store.contains(theirs)
        assert store.put(theirs, entry).stored
        assert store.delete_namespace(ONE) == 1
        assert store.get(mine) is None
        assert store.contains(theirs)
        assert [e.key for e in store.entries()] == [theirs]

    def test_fingerprints_do_not_see_each_other(self, store: Store) -> None:
        key, entry = sample(0)
        store.put(key, entry)
        for name in ("architecture", "weights", "rope", "adapter", "tokenizer"):
            values = {f: getattr(key.fingerprint, f) for f in key.fingerprint.__dataclass_fields__} | {name: "other"}
            assert store.get(CacheKey(ONE, ModelFingerprint(**values), key.content, key.recipe)) is None

    def test_group_is_dropped_at_once(self, store: Store) -> None:
        for number in range(4):
            attributes = Attributes(Priority.TOOL, f"search@{number % 2}")
            key, entry = sample(number, attributes=attributes)
            store.put(key, entry)
        store.put(*sample(9, namespace=TWO, attributes=Attributes(Priority.TOOL, "search@0")))
        assert store.delete_group(ONE, "search@0") == 2
        assert [store.contains(sample(n)[0]) for n in range(4)] == [False, True, False, True]
        assert store.contains(sample(9, namespace=TWO)[0])
        assert store.delete_group(ONE, "") == 0

    def test_time_to_live(self, store: Store) -> None:
        short, long = Attributes(ttl_s=0.4), Attributes(ttl_s=60)
        store.put(*sample(0, attributes=short))
        store.put(*sample(1, attributes=long))
        store.put(*sample(2, attributes=short))
        assert store.touch(sample(2)[0], ttl_s=60)
        time.sleep(0.42)
        assert store.get(sample(0)[0]) is None
        assert not store.contains(sample(0)[0])
        assert store.contains(sample(1)[0])
        assert store.get(sample(2)[0]) is not None
        assert {e.key for e in store.entries()} == {sample(1)[0], sample(2)[0]}
        assert store.put(*sample(0)).stored

    def test_listing_tells_how(self, store: Store) -> None:
        key, entry = sample(3, attributes=Attributes(Priority.SYSTEM, "base", 60))
        store.put(key, entry)
        store.put(*sample(4, namespace=TWO))
        (found,) = store.entries(ONE, key.fingerprint)
        assert (found.key, found.tokens, found.attributes) == (key, 3, entry.attributes)
        assert list(store.entries(ONE, fingerprint(3))) == []
        assert store.catalogue(ONE, key.fingerprint) == {key.content: [found]}

    def test_stats_count(self, store: Store) -> None:
        key, entry = sample(0)
        store.put(key, entry)
        store.get(key)
        store.get(sample(1)[0])
        found = store.stats(ONE)
        assert found.entries == 1
        assert found.nbytes >= entry.kv.nbytes or not self.lossless
        assert (found.counters["puts"], found.counters["hits"], found.counters["misses"]) == (1, 1, 1)
        assert store.stats(TWO).entries == 0

    def test_released_handle_gives_nothing(self, store: Store) -> None:
        key, entry = sample(0)
        store.put(key, entry)
        handle = store.get(key)
        assert handle is not None
        handle.release()
        handle.release()
        with pytest.raises(StoreUnavailable):
            handle.read()

    def test_bad_waits_are_refused(self, store: Store) -> None:
        key, entry = sample(0)
        for bad in (0, -1, float("nan"), float("inf")):
            with pytest.raises(InvalidInput):
                store.put(key, entry, deadline_s=bad)
            with pytest.raises(InvalidInput):
                store.get(key, lease_s=bad)

    def test_closed_store_says_so(self, store: Store) -> None:
        key, entry = sample(0)
        store.put(key, entry)
        store.flush()
        store.close()
        store.close()
        for call in (lambda: store.put(key, entry), lambda: store.get(key), lambda: store.contains(key)):
            with pytest.raises(StoreUnavailable):
                call()

    def test_blobs(self, store: Store) -> None:
        mine, theirs = (ONE, fingerprint()), (TWO, fingerprint())
        assert store.blobs.read(mine, "offsets") is None
        store.blobs.write(mine, "offsets", b"a" * 1000)
        store.blobs.update(mine, "offsets", lambda old: (old or b"") + b"b")
        assert store.blobs.read(mine, "offsets") == b"a" * 1000 + b"b"
        assert store.blobs.read(theirs, "offsets") is None
        assert list(store.blobs.names(mine)) == ["offsets"]
        with pytest.raises(InvalidInput):
            store.blobs.write(mine, "../x", b"")
        store.delete_namespace(ONE)
        assert store.blobs.read(mine, "offsets") is None
        store.blobs.write(mine, "offsets", b"c")
        assert store.blobs.delete(mine, "offsets")
        assert not store.blobs.delete(mine, "offsets")

    def test_threads(self, store: Store) -> None:
        wrong: list[BaseException] = []

        def act(number: int, action: float) -> None:
            if action < 0.4:
                store.put(*sample(number))
            elif action < 0.9:
                holds(store, number) if self.lossless else store.get(sample(number)[0])
            else:
                store.delete(sample(number)[0])

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(60):
                    with suppress(StoreUnavailable):  # deleted by another while it was put: said, as it must be
                        act(chance.randrange(12), chance.random())
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if wrong:
            raise wrong[0]
        assert not any(thread.is_alive() for thread in threads)
