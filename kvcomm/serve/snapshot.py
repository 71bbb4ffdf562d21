"""Snapshots of learned sums as strangers send them: checked before they are read, and again number by number."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import astuple

import torch

from kvcomm.anchors.saved import Learned, restore
from kvcomm.anchors.statistics import Pair, PairSums, bucket_count
from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.store.base import MAX_TOKENS
from kvcomm.types import ModelFingerprint

MAX_PAIRS = 1024
MAX_LABEL_CHARS = 1024
MAX_MODEL = 1024, 1024, 4096
"""Layers, KV heads and head dim beyond any model; a fingerprint with more is refused before its product is taken."""
_MAX_BUCKETS = bucket_count(MAX_TOKENS)
_HEADER_PER_PAIR = 2048 + 6 * MAX_LABEL_CHARS * 3
_ORIGINS = frozenset(("prompt", "decode", "isolated"))
_MAX_HEADER_BYTES = 2 << 20  # room for the tensors of 1,024 pairs, and not for a million empty ones
_MAX_NAMES_BYTES = 4 << 20  # JSON of the pairs' labels, which takes some 20 times that once it is read
_SLACK = 1e-6  # of float64 sums taken in another order, relative
_LEFT = 1e-2  # what subtracting forgotten pairs may leave of a sum that should be 0


def snapshot_bounds(fingerprint: ModelFingerprint) -> tuple[int, int]:
    """Fewest and most bytes of a snapshot for a model of this shape: its schema's, whatever a sender says.

    Raises:
        InvalidInput: dimensions that no model has.
    """
    shape = fingerprint.n_layers, fingerprint.n_kv_heads, fingerprint.head_dim
    if not all(1 <= value <= most for value, most in zip(shape, MAX_MODEL, strict=True)):
        raise InvalidInput(f"layers, KV heads and head dim {shape} are outside 1 to {MAX_MODEL}; check the fingerprint")
    layers, heads, width = shape[0] - 1, shape[1], 2 * shape[2]
    shared = 8 * layers * heads * width * (2 * width + 1)
    bucket = 8 * (2 + layers * heads * (2 * width + 2))
    pair = _MAX_BUCKETS * bucket + 8 * (6 * layers + 1) + _HEADER_PER_PAIR
    return shared, shared + 4096 + MAX_PAIRS * pair


def read_snapshot(data: bytes, fingerprint: ModelFingerprint, max_bytes: int) -> Learned:
    """The sums in a snapshot, which could come from calls. Takes a few times ``len(data)`` of memory, no more.

    Raises:
        InvalidInput: fewer or more bytes than the schema has, or more than ``max_bytes``.
        CorruptEntry: other names, shapes or types; NaN, infinity, negative counts, sums that contradict each other.
    """
    least, most = snapshot_bounds(fingerprint)
    if not least <= len(data) <= min(most, max_bytes):
        raise InvalidInput(
            f"snapshot of {len(data)} bytes is outside {least} to {min(most, max_bytes)} for this model; "
            "send sums of this model, or raise the service's limit"
        )
    try:
        _check_header(data)
        learned = restore(data, fingerprint)
        _check(learned)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptEntry(f"snapshot of learned sums is refused: {str(error)[:200]}") from error
    return learned


def ordered(learned: Learned) -> Learned:
    """The same sums with their pairs in one order, so that equal sums are equal bytes."""
    statistics = copy(learned.statistics)
    statistics.pairs = {pair: learned.statistics.pairs[pair] for pair in sorted(statistics.pairs, key=astuple)}
    return Learned(statistics, {pair: learned.gains[pair] for pair in sorted(learned.gains, key=astuple)})


def _check_header(data: bytes) -> None:
    """Refuse what would take more memory to read than its bytes: very many tensors, or very many names."""
    length = int.from_bytes(data[:8], "little")
    _need(length <= min(_MAX_HEADER_BYTES, len(data) - 8), f"header of {length} bytes exceeds {_MAX_HEADER_BYTES}")
    begin, end = json.loads(data[8 : 8 + length])["pairs"]["data_offsets"]
    _need(0 <= end - begin <= _MAX_NAMES_BYTES, f"names of {end - begin} bytes exceed {_MAX_NAMES_BYTES}")


def _check(learned: Learned) -> None:
    s = learned.statistics
    pairs = {**s.pairs, **learned.gains}
    if len(pairs) > MAX_PAIRS:
        raise ValueError(f"{len(pairs)} pairs exceed {MAX_PAIRS}")
    for pair in pairs:
        _check_pair(pair)
    diagonal = torch.diagonal(s.xx, dim1=-2, dim2=-1)
    for squares in (diagonal, s.yy):
        _need(bool((squares >= -_LEFT).all()), "a sum of squares is negative")
    for products, squares in ((s.xx, diagonal), (s.xy, s.yy)):
        bound = (diagonal.clamp_min(0)[..., :, None] * squares.clamp_min(0)[..., None, :]).sqrt_()
        _need(bool((products.abs() <= bound.mul_(1 + _SLACK).add_(_LEFT)).all()), "a product exceeds its squares")
        if products is s.xx:
            _need(bool(((s.xx - s.xx.mT).abs() <= bound.mul_(_SLACK).add_(_LEFT)).all()), "xx is not symmetric")
    for sums in s.pairs.values():
        _check_sums(sums)
    for gain in learned.gains.values():
        _need(0 <= gain.calls < 2**53, "a count is negative or too large")
        _need(bool((gain.predicted >= 0).all() and (gain.observed >= 0).all()), "a sum of squares is negative")
        bound = (gain.predicted * gain.observed).sqrt() * (1 + _SLACK)
        _need(bool((gain.agreement.abs() <= bound).all()), "a prediction agrees more than fully")


def _check_sums(sums: PairSums) -> None:
    buckets = sums.tokens.shape[0]
    _need(buckets <= _MAX_BUCKETS, f"{buckets} buckets exceed {_MAX_BUCKETS}")
    for counts in (sums.calls, sums.tokens):
        whole = (counts >= 0) & (counts < 2**53) & (counts == counts.floor())
        _need(bool(whole.all()), "a count is negative, broken or too large")
    _need(bool((sums.calls <= sums.tokens).all()), "more calls than tokens")
    _need(bool((sums.squares >= 0).all()), "a sum of squares is negative")
    square = (sums.squares * sums.tokens[:, None]).sqrt() * (1 + _SLACK)
    halves = torch.stack(sums.y.chunk(2, dim=-1), dim=-1).abs().amax(dim=-2)
    _need(bool((halves <= square).all()), "a mean exceeds its squares")


def _check_pair(pair: Pair) -> None:
    _need(pair.origin in _ORIGINS, "an origin is unknown")
    for label in (pair.captured, pair.used):
        label.encode()  # a lone surrogate is a ValueError
        _need(len(label) <= MAX_LABEL_CHARS, f"a label exceeds {MAX_LABEL_CHARS} characters")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
