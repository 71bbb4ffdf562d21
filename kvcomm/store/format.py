"""Preamble and header of a stored entry: docs/format.md in code. Every limit is checked before memory is taken."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import xxhash

from kvcomm.errors import CorruptEntry, InvalidInput, KVCommError
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store.base import MAX_GROUP_CHARS, MAX_TOKENS, Attributes, Priority
from kvcomm.store.encoding import ENCODINGS, TensorSpec, encoding, safetensors_head
from kvcomm.store.seal import TAG_BYTES, EntryCipher
from kvcomm.types import ModelFingerprint, Namespace

MAGIC = b"\x89KVC\r\n\x1a\n"
VERSION = 1
SEALED = 1
PREAMBLE_BYTES = 112
MAX_HEADER_BYTES = 65536
MAX_LAYERS = 4096
MAX_WIDTH = 2**16
MAX_FRAME_BYTES = 2**32
CHECK_BYTES = 16
_FIXED = struct.Struct("<8sHHIIIQ32s32s")
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Head:
    """What a header says of its entry. Times are Unix seconds."""

    key: CacheKey
    tokens: int
    encoding: str
    attributes: Attributes
    created_s: float
    expires_s: float | None


@dataclass(frozen=True, slots=True)
class Preamble:
    """The fixed part. ``bound`` are its first 96 bytes, which every check and seal of the file includes."""

    sealed: bool
    header_bytes: int
    frames: int
    file_bytes: int
    name: bytes
    salt: bytes
    bound: bytes
    check: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a frame lies and what it holds: ``head``, the tensors, ``padding`` zeros and a check of 16 bytes."""

    offset: int
    head: bytes
    specs: tuple[TensorSpec, ...]
    padding: int
    nbytes: int


def frames(head: Head, start: int) -> list[Frame]:
    """All frames of an entry whose first starts at byte ``start``."""
    layer = encoding(head.encoding).specs(head.key.fingerprint, head.tokens)
    result: list[Frame] = []
    for specs, count in ((token_specs(head.tokens), 1), (layer, head.key.fingerprint.n_layers)):
        text = safetensors_head(specs)
        used = len(text) + sum(s.nbytes for s in specs) + CHECK_BYTES
        if used > MAX_FRAME_BYTES:
            raise InvalidInput(f"a layer of {used} bytes exceeds {MAX_FRAME_BYTES}; split the segment")
        padding = -used % _ALIGN
        result.extend(Frame(start + i * (used + padding), text, specs, padding, used + padding) for i in range(count))
        start += count * (used + padding)
    return result


def token_specs(tokens: int) -> tuple[TensorSpec, ...]:
    """Frame 0: the token ids."""
    import torch

    return (TensorSpec("ids", torch.uint32, (tokens,)),)


def seed(bound: bytes, part: int) -> int:
    """Seed of a frame's checksum, so that neither another file's frame nor another frame of this file passes."""
    return xxhash.xxh3_64_intdigest(bound + part.to_bytes(4, "little"))


def encode_head(head: Head, name: bytes, salt: bytes, cipher: EntryCipher | None) -> tuple[bytes, bytes, list[Frame]]:
    """(preamble and header, the bytes bound into every frame, frames).

    Raises:
        InvalidInput: the header exceeds its limit.
    """
    text = json.dumps(_members(head), separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-(PREAMBLE_BYTES + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInput(f"header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}; shorten context or group")
    placed = frames(head, PREAMBLE_BYTES + len(text))
    file_bytes = placed[-1].offset + placed[-1].nbytes
    flags = 0 if cipher is None else SEALED
    bound = _FIXED.pack(MAGIC, VERSION, flags, len(text), len(placed), 0, file_bytes, name, salt)
    if cipher is None:
        return bound + xxhash.xxh3_128_digest(bound + text) + text, bound, placed
    sealed = cipher.seal(0, text, bound)
    return bound + sealed[-TAG_BYTES:] + sealed[:-TAG_BYTES], bound, placed


def decode_preamble(data: bytes, file_bytes: int) -> Preamble:
    """Check and split the first 112 bytes of a file of ``file_bytes`` bytes. Raises CorruptEntry."""
    if len(data) < PREAMBLE_BYTES:
        raise CorruptEntry(f"{len(data)} bytes are fewer than a preamble's {PREAMBLE_BYTES}; the entry is not used")
    magic, version, flags, header_bytes, count, zero, length, name, salt = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CorruptEntry(f"the file starts with {magic!r}, not with {MAGIC!r}; it is no entry")
    if version != VERSION:
        raise CorruptEntry(f"format version {version} is unknown, this kvcomm reads {VERSION}; update kvcomm")
    if flags & ~SEALED or zero:
        raise CorruptEntry(f"flags {flags:#x} or reserved {zero:#x} have unknown bits; update kvcomm")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or (PREAMBLE_BYTES + header_bytes) % _ALIGN:
        raise CorruptEntry(f"header length {header_bytes} is outside 2 to {MAX_HEADER_BYTES}; the entry is not used")
    if length != file_bytes:
        raise CorruptEntry(f"the file has {file_bytes} bytes and says {length}; it was cut or extended")
    bound, check = data[: _FIXED.size], data[_FIXED.size : PREAMBLE_BYTES]
    return Preamble(bool(flags & SEALED), header_bytes, count, length, name, salt, bound, check)


def decode_header(preamble: Preamble, header: bytes, cipher: EntryCipher | None) -> tuple[Head, list[Frame]]:
    """Check a header and place its frames. Raises CorruptEntry."""
    if cipher is None:
        if xxhash.xxh3_128_digest(preamble.bound + header) != preamble.check:
            raise CorruptEntry("preamble or header fail their checksum; the entry is not used")
        text = header
    else:
        text = cipher.open(0, header + preamble.check, preamble.bound)
    try:
        head = _head(json.loads(text))
        if preamble.frames != head.key.fingerprint.n_layers + 1:
            raise CorruptEntry(f"{preamble.frames} frames for {head.key.fingerprint.n_layers} layers; not used")
        placed = frames(head, PREAMBLE_BYTES + preamble.header_bytes)
    except CorruptEntry:
        raise
    except (KVCommError, ValueError, RecursionError) as error:
        raise CorruptEntry(f"header is not valid: {str(error)[:200]}; the entry is not used") from error
    if placed[-1].offset + placed[-1].nbytes != preamble.file_bytes:
        raise CorruptEntry(f"the file has {preamble.file_bytes} bytes, its shapes ask for another length; not used")
    return head, placed


def _members(head: Head) -> dict[str, object]:
    key, kept = head.key, head.attributes
    return {
        "namespace": key.namespace.name, "fingerprint": _plain(key.fingerprint), "content": key.content,
        "recipe": asdict(key.recipe), "tokens": head.tokens, "encoding": head.encoding, "priority": int(kept.priority),
        "group": kept.group, "ttl_s": kept.ttl_s, "created_s": head.created_s, "expires_s": head.expires_s,
    }  # fmt: skip


def _plain(fingerprint: ModelFingerprint) -> dict[str, object]:
    return {f.name: getattr(fingerprint, f.name) for f in fields(fingerprint)}


def _head(found: object) -> Head:
    names = {"namespace", "fingerprint", "content", "recipe", "tokens", "encoding", "priority", "group", "ttl_s",
             "created_s", "expires_s"}  # fmt: skip
    top = _object(found, names)
    model = _object(top["fingerprint"], {f.name for f in fields(ModelFingerprint)})
    how = _object(top["recipe"], {"origin", "context", "preceding", "exact"})
    fingerprint = ModelFingerprint(
        architecture=_text(model, "architecture"),
        weights=_text(model, "weights"),
        rope=_text(model, "rope"),
        dtype=_text(model, "dtype"),
        adapter=_text(model, "adapter"),
        tokenizer=_text(model, "tokenizer"),
        n_layers=_int(model, "n_layers", 1, MAX_LAYERS),
        n_kv_heads=_int(model, "n_kv_heads", 1, MAX_WIDTH),
        head_dim=_int(model, "head_dim", 1, MAX_WIDTH),
    )
    origin, exact = how["origin"], how["exact"]
    if origin not in ("prompt", "decode", "isolated") or not isinstance(exact, bool):
        raise CorruptEntry(f"recipe origin {str(origin)[:40]!r} or exact {str(exact)[:40]!r} is not known; not used")
    recipe = Recipe(origin, _text(how, "context"), _text(how, "preceding"), exact)
    key = CacheKey(Namespace(_text(top, "namespace")), fingerprint, _text(top, "content"), recipe)
    if _text(top, "encoding") not in ENCODINGS:
        raise CorruptEntry(f"encoding {str(top['encoding'])[:40]!r} is not known; update kvcomm")
    group = _text(top, "group")
    if len(group) > MAX_GROUP_CHARS:
        raise CorruptEntry(f"group of {len(group)} characters exceeds {MAX_GROUP_CHARS}; the entry is not used")
    attributes = Attributes(Priority(_int(top, "priority", 0, max(Priority))), group, _seconds(top, "ttl_s"))
    created = _seconds(top, "created_s")
    if created is None:
        raise CorruptEntry("created_s is null; the entry is not used")
    tokens = _int(top, "tokens", 1, MAX_TOKENS)
    return Head(key, tokens, _text(top, "encoding"), attributes, created, _seconds(top, "expires_s"))


def _object(found: object, names: set[str]) -> Mapping[str, object]:
    if not isinstance(found, dict) or set(found) != names:
        raise CorruptEntry(f"header members are not {sorted(names)}; the entry is not used")
    return found


def _text(source: Mapping[str, object], name: str) -> str:
    value = source[name]
    if not isinstance(value, str):
        raise CorruptEntry(f"header member {name} is a {type(value).__name__}, not text; the entry is not used")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise CorruptEntry(f"header member {name} holds half a character; the entry is not used")
    return value


def _int(source: Mapping[str, object], name: str, low: int, high: int) -> int:
    value = source[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CorruptEntry(f"header member {name} is {str(value)[:40]}, not {low} to {high}; the entry is not used")
    return value


def _seconds(source: Mapping[str, object], name: str) -> float | None:
    value = source[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CorruptEntry(f"header member {name} is {str(value)[:40]}, not a time; the entry is not used")
    return float(value)
