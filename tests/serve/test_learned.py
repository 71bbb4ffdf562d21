"""The nodes' sums: free of order, safe against repeats and restarts, apart by namespace; hostile snapshots refused."""

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from kvcomm.anchors.saved import Learned, dump, restore
from kvcomm.errors import CorruptEntry, InvalidInput, KVCommError, StoreUnavailable, Superseded
from kvcomm.serve.learned import LearnedSums, Limits, Subject
from kvcomm.serve.snapshot import ordered, read_snapshot, snapshot_bounds
from kvcomm.store.seal import Keyring
from kvcomm.types import ModelFingerprint, Namespace
from tests.serve.sums import MODEL, learned, pair

ONE, TWO = Subject(Namespace("one"), MODEL), Subject(Namespace("two"), MODEL)
NODES = ("a", "b", "c")
Sent = tuple[str, int]  # node, sequence: the n-th snapshot of a node holds its first n calls
SNAPSHOTS = {(node, n): dump(learned(*range(10 * i, 10 * i + n))) for i, node in enumerate(NODES) for n in (1, 2, 3)}
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def sums(tmp_path: Path) -> Iterator[LearnedSums]:
    service = LearnedSums(tmp_path / "learned")
    yield service
    service.close()


def total(*highest: Sent) -> bytes:
    """The sum of these snapshots as the service gives it out."""
    out = Learned.empty(MODEL)
    for sent in sorted(highest):
        out.merge(restore(SNAPSHOTS[sent], MODEL))
    return dump(ordered(out))


def highest(sent: list[Sent]) -> list[Sent]:
    return [(node, max(n for who, n in sent if who == node)) for node in NODES if any(who == node for who, _ in sent)]


def deliver(folder: Path, steps: list[Sent | None], subject: Subject = ONE, between: bool = False) -> bytes:
    """What an onlooker is given after these deliveries; None restarts the service, ``between`` adds a tenant."""
    service = LearnedSums(folder)
    epochs = {node: service.open(subject, node).epoch for node in (*NODES, "onlooker")}
    for number, step in enumerate(steps):
        if between:
            other = service.open(TWO, f"n{number}")
            service.put(TWO, f"n{number}", other.epoch, 1, SNAPSHOTS["c", 3])
            service.others(TWO, f"n{number}", other.epoch)
        if step is None:
            service.close()
            service = LearnedSums(folder)
        else:
            service.put(subject, step[0], epochs[step[0]], step[1], SNAPSHOTS[step])
    found = service.others(subject, "onlooker", epochs["onlooker"]).data
    service.close()
    assert found is not None
    return found


steps = st.lists(st.sampled_from(sorted(SNAPSHOTS)), max_size=7)


@quick
@given(sent=steps, data=st.data())
def test_order_repeats_and_restarts_do_not_matter(sent: list[Sent], data: st.DataObject) -> None:
    repeated = [*sent, *data.draw(st.lists(st.sampled_from(sent), max_size=5) if sent else st.just([]))]
    shuffled: list[Sent | None] = list(data.draw(st.permutations(repeated)))
    for at in data.draw(st.lists(st.integers(0, len(shuffled)), max_size=2)):
        shuffled.insert(at, None)
    with tempfile.TemporaryDirectory() as folder:
        assert deliver(Path(folder) / "x", shuffled) == total(*highest(sent))


@quick
@given(parts=st.lists(steps, min_size=3, max_size=3))
def test_joining_is_associative(parts: list[list[Sent]]) -> None:
    """(a + b) + c and a + (b + c), each sum in brackets delivered as its highest snapshots alone."""
    a, b, c = parts
    with tempfile.TemporaryDirectory() as folder:
        left = deliver(Path(folder) / "l", [*highest([*a, *b]), *c])
        right = deliver(Path(folder) / "r", [*a, *highest([*b, *c])])
        assert left == right == total(*highest([*a, *b, *c]))


@quick
@given(sent=steps)
def test_a_tenant_is_bit_equal_to_a_world_without_the_other(sent: list[Sent]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone, beside = Path(folder) / "alone", Path(folder) / "beside"
        assert deliver(alone, list(sent)) == deliver(beside, list(sent), between=True)
        services = LearnedSums(alone), LearnedSums(beside)
        answers = [service.open(ONE, "a") for service in services]
        assert answers[0] == answers[1]  # epochs too tell nothing of others
        others = [s.others(ONE, "a", o.epoch) for s, o in zip(services, answers, strict=True)]
        assert others[0] == others[1]
        for service in services:
            service.close()


def test_the_sum_is_that_of_one_book_that_saw_all_calls(tmp_path: Path) -> None:
    found = deliver(tmp_path / "x", [("a", 3), ("b", 2), ("c", 1)])
    assert found == dump(ordered(learned(0, 1, 2, 10, 11, 20)))


def test_a_node_never_gets_its_own_back(sums: LearnedSums) -> None:
    epochs = {node: sums.open(ONE, node).epoch for node in NODES}
    for node in NODES:
        assert sums.put(ONE, node, epochs[node], 2, SNAPSHOTS[node, 2])
        assert not sums.put(ONE, node, epochs[node], 2, SNAPSHOTS[node, 2])
        assert not sums.put(ONE, node, epochs[node], 1, SNAPSHOTS[node, 1])
    for node in NODES:
        found = sums.others(ONE, node, epochs[node])
        assert found.data == total(*((other, 2) for other in NODES if other != node))
        assert sums.others(ONE, node, epochs[node], found.version).data is None


def test_subjects_are_apart(sums: LearnedSums) -> None:
    other_model = replace(MODEL, weights="v")
    subjects = (ONE, TWO, Subject(ONE.namespace, MODEL, "triage"), Subject(ONE.namespace, other_model))
    epoch = sums.open(ONE, "a").epoch
    sums.put(ONE, "a", epoch, 1, SNAPSHOTS["a", 1])
    for subject in subjects[1:]:
        opened = sums.open(subject, "b")
        assert sums.open(subject, "a").data is None
        found = sums.others(subject, "b", opened.epoch).data
        assert found is not None and not restore(found, subject.fingerprint).statistics.pairs


def test_a_restarted_node_goes_on_and_the_old_process_is_shut_out(sums: LearnedSums) -> None:
    old = sums.open(ONE, "a")
    assert (old.kept, old.data) == ((0, 0), None)
    sums.put(ONE, "a", old.epoch, 7, SNAPSHOTS["a", 2])
    new = sums.open(ONE, "a")
    assert (new.kept, new.data) == ((old.epoch, 7), dump(ordered(learned(0, 1))))
    for epoch in (old.epoch, new.epoch + 1, -1):
        with pytest.raises(Superseded):
            sums.put(ONE, "a", epoch, 8, SNAPSHOTS["a", 3])
        with pytest.raises(Superseded):
            sums.others(ONE, "a", epoch)
    assert sums.put(ONE, "a", new.epoch, 1, SNAPSHOTS["a", 1])  # a higher epoch wins over a higher sequence
    with pytest.raises(Superseded):
        sums.put(ONE, "stranger", new.epoch, 1, SNAPSHOTS["a", 1])


def test_forgotten_labels_stay_forgotten(sums: LearnedSums) -> None:
    epochs = {node: sums.open(ONE, node).epoch for node in ("a", "b")}
    for node in epochs:
        sums.put(ONE, node, epochs[node], 3, SNAPSHOTS[node, 3])
    assert sums.forget(ONE, lambda label: label == pair(11).used) == 1
    with pytest.raises(Superseded):  # who still has it cannot bring it back
        sums.put(ONE, "b", epochs["b"], 4, SNAPSHOTS["b", 3])
    a = sums.open(ONE, "a")
    found = sums.others(ONE, "a", a.epoch).data
    assert found is not None
    assert set(restore(found, MODEL).statistics.pairs) == {pair(10), pair(12)}
    assert restore(sums.open(ONE, "b").data or b"", MODEL).statistics.pairs.keys() == {pair(10), pair(12)}


def test_delete_namespace_and_retire(sums: LearnedSums, tmp_path: Path) -> None:
    epochs = {subject: sums.open(subject, "a").epoch for subject in (ONE, TWO)}
    for subject, epoch in epochs.items():
        sums.put(subject, "a", epoch, 1, SNAPSHOTS["a", 1])
    assert sums.delete_namespace(ONE.namespace) == 1 and sums.nodes(ONE) == () and sums.usage(ONE.namespace) == 0
    with pytest.raises(Superseded):
        sums.put(ONE, "a", epochs[ONE], 2, SNAPSHOTS["a", 2])
    assert sums.open(ONE, "a").epoch > epochs[ONE]
    assert sums.open(TWO, "a").data is not None
    assert sums.retire(TWO, "a") and not sums.retire(TWO, "a")
    assert not list((tmp_path / "learned").glob("*.kvs"))


def test_limits(tmp_path: Path) -> None:
    size = len(SNAPSHOTS["a", 1])
    sums = LearnedSums(tmp_path / "x", limits=Limits(nodes=2, snapshot_bytes=size + 9, namespace_bytes=2 * size))
    epochs = {node: sums.open(ONE, node).epoch for node in ("a", "b")}
    with pytest.raises(InvalidInput, match="2 nodes"):
        sums.open(ONE, "c")
    sums.open(TWO, "c")
    sums.put(ONE, "a", epochs["a"], 1, SNAPSHOTS["a", 1])
    with pytest.raises(InvalidInput, match="snapshot of"):
        sums.put(ONE, "a", epochs["a"], 2, SNAPSHOTS["a", 2])
    with pytest.raises(InvalidInput, match="would exceed"):
        sums.put(ONE, "b", epochs["b"], 1, SNAPSHOTS["b", 1])
    assert len(list((tmp_path / "x").glob("*.kvs"))) == 1  # what was refused is gone from the disk
    for name in ("", "../a", "a" * 129, "a b", "ä"):
        with pytest.raises(InvalidInput):
            sums.open(ONE, name)
        with pytest.raises(InvalidInput):
            Subject(ONE.namespace, MODEL, name)
    for sequence in (0, -1, 2**54):
        with pytest.raises(InvalidInput, match="sequence"):
            sums.put(ONE, "a", epochs["a"], sequence, SNAPSHOTS["a", 1])
    sums.close()
    with pytest.raises(StoreUnavailable):
        sums.open(ONE, "a")


def test_files_are_sealed_private_swept_and_checked(tmp_path: Path) -> None:
    folder, ring = tmp_path / "x", Keyring(bytes(32))
    sums = LearnedSums(folder, ring)
    epochs = {node: sums.open(ONE, node).epoch for node in NODES}
    for node in NODES:
        sums.put(ONE, node, epochs[node], 1, SNAPSHOTS[node, 1])
    files = sorted(folder.glob("*.kvs"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in folder.iterdir() if f.suffix != ".sqlite-journal")
    assert not any(b"safetensors" in f.read_bytes() or b'"used"' in f.read_bytes() for f in files)
    sums.close()
    (folder / "left.kvs.tmp").write_bytes(b"half")
    (folder / ("0" * 32 + ".kvs")).write_bytes(b"no row names it")
    sums = LearnedSums(folder, ring)
    assert sorted(folder.glob("*.kvs*")) == files
    a = sums.open(ONE, "a")
    whole = sums.others(ONE, "a", a.epoch)
    assert whole.data == total(("b", 1), ("c", 1))
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    found = sums.others(ONE, "a", a.epoch).data  # corruption is never data
    assert found == dump(Learned.empty(MODEL))
    sums.close()


def forged(**changes: object) -> bytes:
    tensors = load(SNAPSHOTS["a", 2])
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        elif callable(value):
            tensors[name] = value(tensors[name]).contiguous()
        else:
            tensors[name] = value  # type: ignore[assignment]
    return save(tensors)


def names(items: object) -> torch.Tensor:
    return torch.tensor(
        list(items.encode() if isinstance(items, str) else json.dumps(items).encode()), dtype=torch.uint8
    )


def fill(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def filled(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        out.view(-1)[0] = value
        return out

    return filled


GOOD_PAIR = {"origin": "prompt", "captured": "a", "used": "b"}
HOSTILE = {
    **{f"{n} {v}": {n: fill(v)} for n in ("xx", "xy", "yy", "0__sums__calls", "0__sums__tokens", "0__sums__x",
       "0__sums__y", "0__sums__squares", "0__gain__agreement", "0__gain__predicted", "0__gain__calls")
       for v in (float("nan"), float("inf"), float("-inf"))},
    **{f"{n} negative": {n: fill(-5.0)} for n in ("yy", "0__sums__calls", "0__sums__tokens", "0__sums__squares",
       "0__gain__predicted", "0__gain__observed", "0__gain__calls")},
    "xx diagonal": {"xx": fill(-5.0)},
    "xx beyond its squares": {"xx": lambda t: t + torch.full_like(t, 1e6).triu(1) + torch.full_like(t, 1e6).tril(-1)},
    "xx not symmetric": {"xx": lambda t: t.triu()},
    "xy beyond its squares": {"xy": lambda t: t + 1e9},
    "half a token": {"0__sums__tokens": fill(0.5)},
    "more calls than tokens": {"0__sums__calls": fill(9.0)},
    "a huge count": {"0__sums__tokens": fill(1e300)},
    "a mean beyond its squares": {"0__sums__y": fill(1e9)},
    "agreement beyond": {"0__gain__agreement": fill(1e9)},
    "float32": {"xx": lambda t: t.float()},
    "integers": {"0__sums__tokens": lambda t: t.long()},
    "transposed": {"xx": lambda t: t.reshape(-1)},
    "a bucket short": {"0__sums__calls": lambda t: t[:-1]},
    "a missing sum": {"0__sums__x": None},
    "no pairs": {"pairs": None},
    "unknown tensor": {"more": torch.zeros(1)},
    "names no JSON": {"pairs": names("{")},
    "names nested": {"pairs": names("[" * 50_000)},
    "names a number": {"pairs": names(7)},
    "names of numbers": {"pairs": names([1, 2])},
    "names twice": {"pairs": names([GOOD_PAIR, GOOD_PAIR])},
    "too few names": {"pairs": names([GOOD_PAIR])},
    "unknown field": {"pairs": names([GOOD_PAIR | {"x": 1}, GOOD_PAIR])},
    "unknown origin": {"pairs": names([GOOD_PAIR | {"origin": "pickle"}, GOOD_PAIR])},
    "a long label": {"pairs": names([GOOD_PAIR | {"used": "x" * 5000}, GOOD_PAIR])},
    "a lone surrogate": {"pairs": names([GOOD_PAIR | {"used": "\ud800"}, GOOD_PAIR])},
    "floats for names": {"pairs": torch.zeros(4)},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_snapshots_are_refused(what: str) -> None:
    with pytest.raises(CorruptEntry):
        read_snapshot(forged(**HOSTILE[what]), MODEL, 1 << 20)


def test_refused_snapshot_changes_nothing(sums: LearnedSums) -> None:
    epoch, onlooker = sums.open(ONE, "a").epoch, sums.open(ONE, "b").epoch
    sums.put(ONE, "a", epoch, 1, SNAPSHOTS["a", 1])
    for data in (forged(**HOSTILE["xx nan"]), b"", b"x" * 5000, SNAPSHOTS["a", 1][:-1], b"\xff" * 5000):
        with pytest.raises((CorruptEntry, InvalidInput)):
            sums.put(ONE, "a", epoch, 2, data)
    assert sums.others(ONE, "b", onlooker).data == total(("a", 1))


def test_size_is_refused_before_it_is_read() -> None:
    least, most = snapshot_bounds(MODEL)
    for size in (least - 1, most + 1):
        with pytest.raises(InvalidInput, match="outside"):
            read_snapshot(bytes(size), MODEL, 1 << 40)
    with pytest.raises(InvalidInput, match="outside"):
        read_snapshot(bytes(least + 9), MODEL, least + 8)
    for dimensions in ((10**6, 2, 2), (3, 10**9, 2), (3, 2, 10**9), (0, 2, 2), (3, 2, -1)):
        monstrous = ModelFingerprint("tiny", "w", "r", "float32", "", "t", *dimensions)
        with pytest.raises(InvalidInput):  # would be terabytes
            Subject(ONE.namespace, monstrous)
    large = ModelFingerprint("tiny", "w", "r", "float32", "", "t", 1000, 1000, 4000)
    with pytest.raises(InvalidInput, match="snapshot of"):
        read_snapshot(SNAPSHOTS["a", 1], large, 1 << 30)


def test_reading_takes_memory_in_proportion() -> None:
    """Lists of nothing and tensors of nothing, whose Python objects would be 20 times their bytes."""
    names_ = b"[" + b"[]," * 3_000_000 + b"[]]"
    many_names = forged(pairs=torch.frombuffer(bytearray(names_), dtype=torch.uint8))
    empty = {f"t{n}": {"dtype": "F64", "shape": [0], "data_offsets": [0, 0]} for n in range(60_000)}
    header = json.dumps(empty).encode()
    many_tensors = len(header).to_bytes(8, "little") + header + bytes(5000)
    liar = (1 << 63).to_bytes(8, "little") + bytes(5000)
    for data in (many_names, many_tensors, liar):
        tracemalloc.start()
        try:
            with pytest.raises(CorruptEntry, match="exceed"):
                read_snapshot(data, MODEL, 1 << 30)
            assert tracemalloc.get_traced_memory()[1] < 20 << 20
        finally:
            tracemalloc.stop()


def test_what_was_learned_and_forgotten_is_accepted() -> None:
    for scale in (1.0, 1e-3, 1e5):
        whole = learned(*range(6))
        for name in ("xx", "xy", "yy"):
            getattr(whole.statistics, name).mul_(scale)
        for sums in whole.statistics.pairs.values():
            sums.x.mul_(scale**0.5), sums.y.mul_(scale**0.5), sums.squares.mul_(scale)
        for number in range(6):
            whole.forget(lambda label, n=number: label == pair(n).used)
            read_snapshot(dump(whole), MODEL, 1 << 20)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(SNAPSHOTS["a", 2]) - 1), with_=st.binary(min_size=1, max_size=8))
def test_damage_is_refused_with_a_typed_error_or_gives_sums_that_can_be(at: int, with_: bytes) -> None:
    data = SNAPSHOTS["a", 2]
    damaged = (data[:at] + with_ + data[at + len(with_) :])[: len(data)]
    try:
        found = read_snapshot(damaged, MODEL, 1 << 20)
    except KVCommError:
        return
    assert all(bool(torch.isfinite(t).all()) for t in (found.statistics.xx, found.statistics.xy, found.statistics.yy))
