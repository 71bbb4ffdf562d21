"""A pool in one file: the same bytes back, refused across fingerprints and namespaces, nothing of a damaged one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcomm.anchors import poolfile
from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.pool import BasePool
from kvcomm.anchors.statistics import Pair
from kvcomm.errors import CorruptEntry, FingerprintMismatch, InvalidInput, StoreUnavailable
from kvcomm.keys import Recipe
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

FINGERPRINT = ModelFingerprint("Tiny", "w", "r", "float32", "", "t", 2, 2, 4)
SPACE = Namespace("ours")


def kv_of(tokens: int, seed: int) -> SegmentKV:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 2, tokens, 4, generator=generator)
    return SegmentKV(keys, values)


def pool_of(*lengths: int, parent: BasePool | None = None, first: int = 0) -> BasePool:
    pool = BasePool(SPACE, FINGERPRINT, parent=parent)
    for n, length in enumerate(lengths, start=first):
        segment = Segment(tuple(range(n, n + length)))
        pool.put(segment, Recipe("prompt", f"a/{n}", f"p{n}", bool(n % 2)), kv_of(length, n))
    return pool


def book_of(observed: int = 2) -> OffsetBook:
    book = OffsetBook(FINGERPRINT)
    for n in range(observed):
        book.learn([Observation(Pair("prompt", "a/0", "b/0"), kv_of(5, n), kv_of(5, n + 50))])
    return book


def test_bases_and_offsets_come_back_bit_for_bit(tmp_path: Path) -> None:
    pool, book, path = pool_of(3, 20, 7), book_of(), tmp_path / "pool"
    assert poolfile.save(path, pool, book) == 3
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["pool"]
    back, learned = BasePool(SPACE, FINGERPRINT), OffsetBook(FINGERPRINT)
    assert poolfile.load(path, back, learned) == 3
    assert back.digest() == pool.digest()
    for mine, theirs in zip(back, pool, strict=True):  # in the order of use
        assert (mine.segment, mine.recipe) == (theirs.segment, theirs.recipe)
        assert torch.equal(mine.kv.keys, theirs.kv.keys) and torch.equal(mine.kv.values, theirs.kv.values)
    assert learned.statistics.digest() == book.statistics.digest()
    assert {pair: gain.calls for pair, gain in learned.gains.items()} == {p: g.calls for p, g in book.gains.items()}
    assert poolfile.load(path, back) == 0  # all held already; no book, no offsets


def test_a_child_is_saved_with_what_it_reads_through_to(tmp_path: Path) -> None:
    parent = pool_of(3, 4)
    poolfile.save(tmp_path / "pool", pool_of(6, parent=parent, first=9))
    back = BasePool(SPACE, FINGERPRINT)
    assert poolfile.load(tmp_path / "pool", back) == 3


def test_limits_of_the_pool_hold(tmp_path: Path) -> None:
    poolfile.save(tmp_path / "pool", pool_of(*[5] * 9))
    small = BasePool(SPACE, FINGERPRINT, max_entries=4)
    assert poolfile.load(tmp_path / "pool", small) == 9 and len(small) == 4
    assert [base.recipe.context for base in small] == ["a/5", "a/6", "a/7", "a/8"]  # the last used


@pytest.mark.parametrize(
    "change", [{"weights": "x"}, {"dtype": "bfloat16"}, {"adapter": "a"}, {"n_layers": 3}], ids=str
)
def test_another_fingerprint_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    poolfile.save(tmp_path / "pool", pool_of(3), book_of())
    other = replace(FINGERPRINT, **change)  # type: ignore[arg-type]
    pool, book = BasePool(SPACE, other), OffsetBook(other)
    with pytest.raises(FingerprintMismatch, match=f"{FINGERPRINT.digest[:12]}, the model {other.digest[:12]}"):
        poolfile.load(tmp_path / "pool", pool, book)
    with pytest.raises(FingerprintMismatch, match="the book"):
        poolfile.save(tmp_path / "other", pool, book_of())
    assert not len(pool) and not book.statistics.pairs and os.listdir(tmp_path) == ["pool"]


def test_another_namespace_and_a_book_that_knows_something_are_refused(tmp_path: Path) -> None:
    poolfile.save(tmp_path / "pool", pool_of(3), book_of())
    with pytest.raises(InvalidInput, match="namespace 'ours', the pool to theirs"):
        poolfile.load(tmp_path / "pool", BasePool(Namespace("theirs"), FINGERPRINT))
    pool, book = BasePool(SPACE, FINGERPRINT), book_of(1)
    before = book.statistics.digest()
    with pytest.raises(InvalidInput, match="offsets of 1 pairs of places were learned here already"):
        poolfile.load(tmp_path / "pool", pool, book)
    assert not len(pool) and book.statistics.digest() == before


def test_no_byte_can_be_changed_added_or_cut(tmp_path: Path) -> None:
    """Padding and salts included: every byte is under a checksum, and nothing is added where one is wrong."""
    path = tmp_path / "pool"
    poolfile.save(path, pool_of(2, 3), book_of(1))
    whole = path.read_bytes()
    changed = [whole[:n] + bytes([whole[n] ^ 0x41]) + whole[n + 1 :] for n in range(0, len(whole), 97)]
    changed += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(poolfile.HEAD_BYTES)]
    cut = [whole[:n] for n in (0, 1, 100, poolfile.HEAD_BYTES, len(whole) // 2, len(whole) - 1)]
    for bad in [*changed, *cut, whole + b"\0", b"\x80\x04K\x01."]:
        path.write_bytes(bad)
        pool, book = BasePool(SPACE, FINGERPRINT), OffsetBook(FINGERPRINT)
        with pytest.raises((CorruptEntry, FingerprintMismatch, InvalidInput)):
            poolfile.load(path, pool, book)
        assert not len(pool) and not book.statistics.pairs


def test_a_head_that_asks_for_much_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    for entries, learned in ((2**60, 0), (0, 2**60), (1, 2**30)):
        path.write_bytes(poolfile._head(SPACE, FINGERPRINT, entries, learned))
        with pytest.raises(CorruptEntry):
            poolfile.load(path, BasePool(SPACE, FINGERPRINT))


def test_links_folders_and_absent_files_are_refused(tmp_path: Path) -> None:
    poolfile.save(tmp_path / "pool", pool_of(3))
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    for name in ("link", "absent"):
        with pytest.raises(StoreUnavailable):
            poolfile.load(tmp_path / name, BasePool(SPACE, FINGERPRINT))
    with pytest.raises(InvalidInput, match="no regular file"):
        poolfile.load(tmp_path, BasePool(SPACE, FINGERPRINT))
    with pytest.raises(StoreUnavailable, match="writing pool"):
        poolfile.save(tmp_path / "absent" / "pool", pool_of(3))


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool"
    poolfile.save(path, pool_of(3))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(poolfile.Files, "fsync", full)
    with pytest.raises(StoreUnavailable, match="no space"):
        poolfile.save(path, pool_of(3, 4, 5))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["pool"]
