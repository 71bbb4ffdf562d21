"""KV is as secret as the prompt: what one who reads the files, and has the model's weights, can tell."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import Attributes, DiskStore, Entry, Keyring
from kvcomm.store.testing import ONE, fingerprint
from kvcomm.types import Segment, SegmentKV

VOCABULARY, TOKENS, WIDTH, HEADS, DIM = 1000, 300, 32, 2, 16
MODEL = fingerprint(2, HEADS, DIM)
CANARY = "canary-7f3a"


def layer_0() -> torch.Tensor:
    """Keys and values of layer 0 for every token of the vocabulary: they depend on the token alone."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
    weights = torch.randn(WIDTH, 2 * HEADS * DIM, generator=generator)
    return embedding / embedding.norm(dim=-1, keepdim=True) @ weights


def stored(folder: Path, keyring: Keyring | None) -> tuple[torch.Tensor, bytes]:
    """A prompt put into a store: its token ids, and the file that an attacker reads."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    first = layer_0()[ids].reshape(TOKENS, 2, HEADS, DIM).permute(1, 2, 0, 3)
    rest = torch.randn(2, HEADS, TOKENS, DIM, generator=generator)
    keys, values = (torch.stack([first[n], rest[n]]) for n in range(2))
    segment = Segment(tuple(ids.tolist()))
    key = CacheKey.of(ONE, MODEL, segment, Recipe("prompt", CANARY, "x", True))
    with DiskStore(folder, keyring=keyring) as store:
        store.put(key, Entry(segment, SegmentKV(keys, values), Attributes(group=CANARY)))
        store.blobs.write((ONE, MODEL), "offsets", CANARY.encode())
    (path,) = (p for p in (folder / "entries").rglob("*") if p.is_file())
    return ids, path.read_bytes()


def attack(found: torch.Tensor) -> torch.Tensor:
    """For each token the vocabulary's nearest layer-0 keys and values [tokens, 2 * heads * dim]."""
    return torch.cdist(found.nan_to_num(0, 0, 0).clamp(-1e4, 1e4), layer_0()).argmin(-1)


def test_a_plain_file_gives_its_tokens_away(tmp_path: Path) -> None:
    ids, data = stored(tmp_path, None)
    header = struct.unpack_from("<I", data, 12)[0]
    start = data.index(b'{"keys"', 112 + header) - 8
    head = struct.unpack_from("<Q", data, start)[0]
    size = 8 + head + 2 * HEADS * TOKENS * DIM * 4
    frame = load(data[start : start + size])
    both = torch.stack([frame["keys"], frame["values"]]).permute(2, 0, 1, 3).reshape(TOKENS, -1)
    assert (attack(both) == ids).float().mean() >= 0.99


def test_a_sealed_file_gives_nothing_away(tmp_path: Path) -> None:
    ids, data = stored(tmp_path, Keyring(b"k" * 32))
    assert b"keys" not in data
    size = 2 * HEADS * TOKENS * DIM * 4
    for start in range(0, len(data) - size, 997):
        found = torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.float32)
        both = found.reshape(2, HEADS, TOKENS, DIM).permute(2, 0, 1, 3).reshape(TOKENS, -1)
        assert (attack(both) == ids).float().mean() < 0.03


@pytest.mark.parametrize("sealed", [False, True])
def test_labels_and_tokens_appear_only_where_they_may(tmp_path: Path, sealed: bool) -> None:
    ids, _ = stored(tmp_path, Keyring(b"k" * 32) if sealed else None)
    tokens = struct.pack("<16I", *ids[:16].tolist())
    segment = Segment(tuple(ids.tolist()))
    everything = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for secret in (CANARY.encode(), tokens, segment.digest.encode(), bytes.fromhex(segment.digest)):
        places = {p.relative_to(tmp_path).parts[0] for p, data in everything.items() if secret in data}
        assert not places if sealed else places <= {"entries", "blobs"}


def test_the_same_entry_sealed_twice_shares_no_bytes(tmp_path: Path) -> None:
    one, two = (stored(tmp_path / n, Keyring(b"k" * 32))[1] for n in "ab")
    blocks = [{d[i : i + 16] for i in range(128, len(d) - 16, 16)} for d in (one, two)]
    assert not blocks[0] & blocks[1]


def test_nothing_secret_is_shown() -> None:
    assert "6b6b" not in repr(Keyring(b"k" * 32))
    assert "kkkk" not in repr(Keyring(b"k" * 32))
