"""The format: any safetensors reader opens a frame; every changed byte is found; names and places are bound."""

import random
import struct

import pytest
import torch
from safetensors.torch import load

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import Keyring, empty_kv
from kvcomm.store.codec import BytesSource, EntryReader, EntryWriter
from kvcomm.store.format import MAX_HEADER_BYTES, PREAMBLE_BYTES, frames
from kvcomm.store.testing import ONE, TWO, fingerprint, same, sample
from kvcomm.types import ModelFingerprint, SegmentKV

KEYRINGS = [None, Keyring(b"k" * 32)]


def encoded(number: int = 1, keyring: Keyring | None = None, **options: object) -> tuple[CacheKey, bytes]:
    key, entry = sample(number, **options)  # type: ignore[arg-type]
    writer = EntryWriter(key, entry, "raw", 1.5, None, keyring)
    data = b"".join(b"".join(part) for part in writer)
    assert len(data) == writer.nbytes
    return key, data


def read(data: bytes, key: CacheKey, keyring: Keyring | None = None) -> SegmentKV:
    reader = EntryReader(BytesSource(data), key.namespace.name, key, keyring)
    out = empty_kv(key.fingerprint, reader.head.tokens)
    reader.segment()
    for layer in range(key.fingerprint.n_layers):
        reader.layer_into(layer, out.keys[layer], out.values[layer])
    return out


@pytest.mark.parametrize("keyring", KEYRINGS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 300])
def test_round_trip(keyring: Keyring | None, tokens: int) -> None:
    key, data = encoded(1, keyring, tokens=tokens)
    assert same(read(data, key, keyring), sample(1, tokens=tokens)[1].kv)


def test_a_frame_is_a_safetensors_file() -> None:
    key, data = encoded(2, tokens=5)
    reader = EntryReader(BytesSource(data), "one", key)
    entry = sample(2, tokens=5)[1]
    header_bytes = struct.unpack_from("<I", data, 12)[0]
    placed = frames(reader.head, PREAMBLE_BYTES + header_bytes)
    for part, frame in enumerate(placed):
        end = frame.offset + len(frame.head) + sum(s.nbytes for s in frame.specs)
        found = load(data[frame.offset : end])
        assert frame.offset % 64 == 0
        if part == 0:
            assert found["ids"].to(torch.int64).tolist() == list(entry.segment.token_ids)
        else:
            assert torch.equal(found["keys"], entry.kv.keys[part - 1])
            assert torch.equal(found["values"], entry.kv.values[part - 1])


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_every_changed_byte_is_found(keyring: Keyring | None) -> None:
    key, data = encoded(3, keyring)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptEntry):
            read(bytes(bad), key, keyring)


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_every_length_is_found(keyring: Keyring | None) -> None:
    key, data = encoded(3, keyring)
    for length in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(CorruptEntry):
            read(data[:length], key, keyring)
    for more in (b"\0", b"\0" * 64, data):
        with pytest.raises(CorruptEntry):
            read(data + more, key, keyring)


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_frames_cannot_be_exchanged(keyring: Keyring | None) -> None:
    key, data = encoded(4, keyring)
    _, again = encoded(4, keyring)
    head = EntryReader(BytesSource(data), "one", key, keyring).head
    placed = frames(head, PREAMBLE_BYTES + struct.unpack_from("<I", data, 12)[0])
    first, second = placed[1].offset, placed[2].offset
    end = second + placed[2].nbytes
    swapped = data[:first] + data[second:end] + data[first:second]
    other = data[:first] + again[first:]
    for bad in (swapped, other):
        with pytest.raises(CorruptEntry):
            read(bad, key, keyring)


@pytest.mark.parametrize("keyring", KEYRINGS)
def test_another_key_or_namespace_is_refused(keyring: Keyring | None) -> None:
    key, data = encoded(5, keyring)
    others = [
        sample(6)[0], sample(5, namespace=TWO)[0],
        CacheKey(ONE, key.fingerprint, key.content, Recipe("prompt", "a/b", "", True)),
        CacheKey(ONE, fingerprint(3), key.content, key.recipe),
    ]  # fmt: skip
    for other in others:
        with pytest.raises(CorruptEntry):
            read(data, other, keyring)


def test_sealing_is_not_optional_for_the_reader() -> None:
    ring = Keyring(b"k" * 32)
    key, plain = encoded(7)
    _, sealed = encoded(7, ring)
    for data, keyring in ((plain, ring), (sealed, None), (sealed, Keyring(b"x" * 32))):
        with pytest.raises(CorruptEntry):
            read(data, key, keyring)
    assert b"neutral" in plain
    assert b"neutral" not in sealed


def test_long_header_is_refused_when_written() -> None:
    key, entry = sample(1)
    long = CacheKey(ONE, key.fingerprint, key.content, Recipe("prompt", "x" * MAX_HEADER_BYTES, "", True))
    with pytest.raises(InvalidInput, match="header"):
        EntryWriter(long, entry, "raw", 0.0, None)


def test_a_header_with_a_right_checksum_and_wrong_content_is_refused() -> None:
    import xxhash

    key, data = encoded(8)
    length = struct.unpack_from("<I", data, 12)[0]
    header = data[PREAMBLE_BYTES : PREAMBLE_BYTES + length]
    changes = [
        (b'"tokens":3', b'"tokens":4'), (b'"tokens":3', b'"tokens":0'), (b'"tokens":3', b'"tokens":-'),
        (b'"float32"', b'"float64"'), (b'"float32"', b'"nothing"'), (b'"float32"', b'"storage"'),
        (b'"n_layers":2', b'"n_layers":9'), (b'"head_dim":4', b'"head_dim":8'), (b'"head_dim":4', b'"head_dim":"'),
        (b'"encoding":"raw"', b'"encoding":"row"'), (b'"priority":0', b'"priority":7'), (b'"one"', b'"two"'),
        (b'"exact":false', b'"exact":12345'), (b'"isolated"', b'"isolates"'), (b'"group":""', b'"grope":""'),
        (b"{", b"["), (b'"created_s":1.5', b'"created_s":1e999'), (b'"created_s":1.5', b'"created_s":NaN'),
    ]  # fmt: skip
    for old, new in changes:
        assert old in header
        bad = (header.replace(old, new, 1) + b" " * len(header))[: len(header)]
        forged = data[:96] + xxhash.xxh3_128_digest(data[:96] + bad) + bad + data[PREAMBLE_BYTES + length :]
        with pytest.raises(CorruptEntry):
            read(forged, key)
    deep = (b"[" * len(header))[: len(header)]
    with pytest.raises(CorruptEntry):
        read(data[:96] + xxhash.xxh3_128_digest(data[:96] + deep) + deep + data[PREAMBLE_BYTES + length :], key)


def test_random_bytes_never_do_more_than_raise() -> None:
    chance = random.Random(0)
    key, data = encoded(9)
    for _ in range(2000):
        bad = bytearray(data[:200] if chance.random() < 0.5 else chance.randbytes(chance.randrange(400)))
        if bad:
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        with pytest.raises(CorruptEntry):
            read(bytes(bad), key)


def test_all_fields_come_back() -> None:
    fields = {"architecture": "Äb", "weights": "w", "rope": "", "dtype": "bfloat16", "adapter": "a/1", "tokenizer": "t"}
    model = ModelFingerprint(**fields, n_layers=1, n_kv_heads=3, head_dim=2)  # type: ignore[arg-type]
    key, data = encoded(1, model=model)
    reader = EntryReader(BytesSource(data), "one")
    assert (reader.head.key, reader.head.tokens, reader.head.created_s) == (key, 3, 1.5)
