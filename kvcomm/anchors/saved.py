"""What was learned as bytes, and kept beside a store's entries: sums that every process adds its own to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvcomm.anchors.gain import Gain
from kvcomm.anchors.statistics import OffsetStatistics, Pair, PairSums
from kvcomm.errors import CorruptEntry, StoreError
from kvcomm.store.base import Store
from kvcomm.types import ModelFingerprint, Namespace

log = logging.getLogger(__name__)
BLOB = "offsets"
_GAIN = ("agreement", "predicted", "observed")


@dataclass
class Learned:
    """Statistics and the running test of their predictions; both add."""

    statistics: OffsetStatistics
    gains: dict[Pair, Gain] = field(default_factory=dict)

    @classmethod
    def empty(cls, fingerprint: ModelFingerprint) -> Learned:
        """Nothing learned yet about a model."""
        return cls(OffsetStatistics(fingerprint.n_layers, fingerprint.n_kv_heads, fingerprint.head_dim))

    def merge(self, other: Learned) -> None:
        """Add what another learned; the same observations must not be merged twice."""
        self.statistics.merge(other.statistics)
        for pair, gain in other.gains.items():
            self.gains.setdefault(pair, Gain(self.statistics.layers)).add(gain)

    def age(self, pair: Pair, weight: float) -> None:
        """Let a pair's means and tests count ``weight`` (0 to 1) times; with 0 they are dropped."""
        if pair in self.statistics.pairs:
            if weight > 0:
                self.statistics.age(pair, weight)
            else:
                self.statistics.drop(pair)
        if weight <= 0:
            self.gains.pop(pair, None)
        elif pair in self.gains:
            self.gains[pair].age(weight)

    def forget(self, which: Callable[[str], bool]) -> int:
        """Drop the means and tests of every pair captured or used at a label that ``which`` chooses.

        Returns:
            how many pairs there were; the shared sums keep what they taught (OffsetStatistics.forget).
        """
        pairs = [p for p in {**self.statistics.pairs, **self.gains} if which(p.captured) or which(p.used)]
        for pair in pairs:
            self.gains.pop(pair, None)
        for label in {label for pair in pairs for label in (pair.captured, pair.used) if which(label)}:
            self.statistics.forget(label)
        return len(pairs)


def dump(learned: Learned) -> bytes:
    """Everything learned as one safetensors file of float64 tensors, pairs' names as JSON in its metadata."""
    s = learned.statistics
    tensors = {"xx": s.xx, "xy": s.xy, "yy": s.yy}
    pairs = list(dict.fromkeys([*s.pairs, *learned.gains]))
    for n, pair in enumerate(pairs):
        sums = s.pairs.get(pair)
        if sums is not None:
            tensors |= {f"{n}.sums.{name}": tensor for name, tensor in sums.tensors().items()}
        gain = learned.gains.get(pair)
        if gain is not None:
            tensors |= {f"{n}.gain.{name}": getattr(gain, name) for name in _GAIN}
            tensors[f"{n}.gain.calls"] = torch.tensor([gain.calls], dtype=torch.float64)
    names = json.dumps([asdict(pair) for pair in pairs]).encode()
    tensors["pairs"] = torch.frombuffer(bytearray(names), dtype=torch.uint8)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def restore(data: bytes, fingerprint: ModelFingerprint) -> Learned:
    """What ``dump`` wrote, every name, shape and number checked.

    Raises:
        CorruptEntry: the bytes are not such a file for a model of this shape, or hold NaN or infinity.
    """
    learned = Learned.empty(fingerprint)
    try:
        tensors = load(data)
        named = tensors.pop("pairs")
        if named.dtype != torch.uint8:
            raise ValueError(f"names are {named.dtype}, expected uint8")
        pairs = [Pair(**{k: str(v) for k, v in item.items()}) for item in json.loads(named.numpy().tobytes())]
        if len(set(pairs)) != len(pairs):
            raise ValueError("a pair stands in it twice")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError("it holds numbers that are not finite")
        s = learned.statistics
        for name in ("xx", "xy", "yy"):
            setattr(s, name, _take(tensors, name, tuple(getattr(s, name).shape)))
        for n, pair in enumerate(pairs):
            if f"{n}.sums.tokens" in tensors:
                s.pairs[pair] = _sums(tensors, f"{n}.sums.", s)
            if f"{n}.gain.calls" in tensors:
                gain = Gain(s.layers)
                gain.calls = int(_take(tensors, f"{n}.gain.calls", (1,)))
                for name in _GAIN:
                    setattr(gain, name, _take(tensors, f"{n}.gain.{name}", (s.layers, 2)))
                learned.gains[pair] = gain
        if tensors:
            raise ValueError(f"unknown tensors {sorted(tensors)[:5]}")
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CorruptEntry(f"learned offsets are unreadable ({str(error)[:200]}); they are not used") from error
    return learned


def _take(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = tensors.pop(name)
    if tensor.dtype != torch.float64 or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected float64 {shape}")
    return tensor.clone()


def _sums(tensors: dict[str, torch.Tensor], prefix: str, like: OffsetStatistics) -> PairSums:
    sums = PairSums(like.layers, like.heads, like.width)
    sums.grow(int(tensors[f"{prefix}tokens"].shape[0]))
    for name, tensor in sums.tensors().items():
        setattr(sums, name, _take(tensors, prefix + name, tuple(tensor.shape)))
    return sums


def load_from(store: Store, namespace: Namespace, fingerprint: ModelFingerprint) -> Learned:
    """What all processes have saved in ``store`` so far; nothing where that cannot be read, which is logged."""
    try:
        data = store.blobs.read((namespace, fingerprint), BLOB)
        return Learned.empty(fingerprint) if data is None else restore(data, fingerprint)
    except StoreError as error:
        log.warning("learned offsets could not be read, beginning without: %s", error)
        return Learned.empty(fingerprint)


def add_to(store: Store, namespace: Namespace, fingerprint: ModelFingerprint, fresh: Learned) -> None:
    """Add what this process learned since it last did to what ``store`` keeps, under its lock, durably.

    Raises:
        StoreError: it could not be written; what was there stays.
    """

    def merged(old: bytes | None) -> bytes:
        total = Learned.empty(fingerprint)
        if old is not None:
            try:
                total = restore(old, fingerprint)
            except CorruptEntry as error:
                log.warning("replacing unreadable offsets: %s", error)
        total.merge(fresh)
        return dump(total)

    store.blobs.update((namespace, fingerprint), BLOB, merged)


def forget_in(store: Store, namespace: Namespace, fingerprint: ModelFingerprint, which: Callable[[str], bool]) -> None:
    """Forget labels, as Learned.forget does, in what all processes have saved in ``store``.

    Raises:
        StoreError: it could not be written; what was there stays.
    """

    def without(old: bytes | None) -> bytes:
        learned = Learned.empty(fingerprint) if old is None else restore(old, fingerprint)
        learned.forget(which)
        return dump(learned)

    owner = (namespace, fingerprint)
    if store.blobs.read(owner, BLOB) is not None:
        store.blobs.update(owner, BLOB, without)
