"""Namespaces, fingerprints, segments and their KV: what they accept, what they refuse, and what names them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kvcomm.errors import InvalidInput
from kvcomm.types import (
    MAX_TOKEN_ID,
    ModelFingerprint,
    Namespace,
    Segment,
    SegmentKV,
    digest_fields,
    digest_tokens,
)

FINGERPRINT = ModelFingerprint("Llama abc", "w" * 64, "r" * 64, "float32", "", "t" * 64, 3, 2, 16)


@pytest.mark.parametrize("name", ["a", "public", "Tenant-7.x_y", "0", "a" * 128])
def test_namespace_accepts(name: str) -> None:
    assert str(Namespace(name)) == name


@pytest.mark.parametrize("name", ["", "a" * 129, "-a", ".hidden", "a/b", "a b", "a\n", "ä", "a\x00", "../up"])
def test_namespace_refuses(name: str) -> None:
    with pytest.raises(InvalidInput, match="choose such a name"):
        Namespace(name)


def test_each_fingerprint_field_changes_the_digest() -> None:
    digests = {FINGERPRINT.digest}
    for field in fields(FINGERPRINT):
        value = getattr(FINGERPRINT, field.name)
        digests.add(replace(FINGERPRINT, **{field.name: value + 1 if isinstance(value, int) else value + "x"}).digest)
    assert len(digests) == len(fields(FINGERPRINT)) + 1


def test_fingerprint_counts_bytes_and_refuses_what_is_no_dtype() -> None:
    assert FINGERPRINT.bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert replace(FINGERPRINT, dtype="bfloat16").bytes_per_token == 2 * 3 * 2 * 16 * 2
    for wrong in ("float33", "nn", "Tensor"):
        with pytest.raises(InvalidInput, match=wrong):
            _ = replace(FINGERPRINT, dtype=wrong).torch_dtype


def test_joining_fields_does_not_collide() -> None:
    lists = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (), (b"",), (b"", b"")]
    assert len({digest_fields(*parts) for parts in lists}) == len(lists)


def test_token_digest_is_what_it_says() -> None:
    body = struct.pack("<3I", 5, 0, MAX_TOKEN_ID)
    by_hand = hashlib.sha256()
    for part in (b"tokens", body):
        by_hand.update(len(part).to_bytes(8, "little") + part)
    assert digest_tokens([5, 0, MAX_TOKEN_ID]) == by_hand.hexdigest()
    assert digest_tokens([1, 2]) != digest_tokens([2, 1]) != digest_tokens([1, 2, 0])


@pytest.mark.parametrize("token", [-1, MAX_TOKEN_ID + 1, 1.0, "1", True, None, torch.tensor(1)])
def test_segment_refuses_what_is_no_token_id(token: Any) -> None:
    with pytest.raises(InvalidInput, match="at index 1"):
        Segment((3, token))


def test_segment_is_named_by_its_content() -> None:
    assert Segment((1, 2)) == Segment((1, 2)) != Segment((2, 1))
    assert Segment((1, 2)).digest == digest_tokens([1, 2])
    assert len(Segment(())) == 0


def test_segment_takes_any_sequence_and_keeps_a_tuple() -> None:
    ids = [1, 2]
    segment = Segment(ids)  # type: ignore[arg-type]
    ids.append(3)
    assert segment == Segment((1, 2)) and hash(segment) == hash(Segment((1, 2)))


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (kv(3, 2, 5), kv(3, 2, 5)),
        (kv(3, 2, 5, 16), kv(3, 2, 4, 16)),
        (kv(3, 2, 5, 16), kv(3, 2, 5, 16, dtype=torch.bfloat16)),
        (kv(3, 2, 5, 16), torch.empty(3, 2, 5, 16, device="meta")),
    ],
)
def test_kv_must_agree(keys: torch.Tensor, values: torch.Tensor) -> None:
    with pytest.raises(InvalidInput, match="must agree"):
        SegmentKV(keys, values)


def test_kv_is_checked_against_the_fingerprint() -> None:
    held = SegmentKV(kv(3, 2, 5, 16), kv(3, 2, 5, 16))
    held.check(FINGERPRINT, 5)
    assert (len(held), held.nbytes) == (5, 5 * FINGERPRINT.bytes_per_token)
    with pytest.raises(InvalidInput, match="compute it again"):
        held.check(FINGERPRINT, 6)
    for change in ({"n_layers": 4}, {"n_kv_heads": 1}, {"head_dim": 8}, {"dtype": "bfloat16"}):
        with pytest.raises(InvalidInput, match="compute it again"):
            held.check(replace(FINGERPRINT, **change), 5)  # type: ignore[arg-type]
