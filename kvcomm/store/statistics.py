"""Named blobs as bytes: the file of one (docs/format.md, last section), and named tensors inside one."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.store.blobs import MAX_BLOB_BYTES, Owner
from kvcomm.store.seal import Keyring
from kvcomm.types import digest_fields

_MAGIC = b"\x89KVS\r\n\x1a\n"
_FIXED = struct.Struct("<8sHHIQ32s")
BLOB_HEAD_BYTES = _FIXED.size + 16


def encode_blob(owner: Owner, name: str, data: bytes, keyring: Keyring | None) -> bytes:
    """The file of a blob. Raises InvalidInput above 1 GiB."""
    if len(data) > MAX_BLOB_BYTES:
        raise InvalidInput(f"blob {name} of {len(data)} bytes exceeds {MAX_BLOB_BYTES}; split it")
    salt = secrets.token_bytes(32)
    fixed = _FIXED.pack(_MAGIC, 1, int(keyring is not None), 0, len(data), salt)
    place = _place(owner, name)
    if keyring is None:
        return fixed + _check(place, fixed, data) + data
    sealed = keyring.cipher(owner[0].name, place, salt).seal(0, data, fixed)
    return fixed + sealed[-16:] + sealed[:-16]


def decode_blob(owner: Owner, name: str, raw: bytes, keyring: Keyring | None) -> bytes:
    """The blob in a file. Raises CorruptEntry unless it is whole and is the one that was asked for."""
    if len(raw) < BLOB_HEAD_BYTES:
        raise CorruptEntry(f"blob {name} has {len(raw)} bytes, fewer than {BLOB_HEAD_BYTES}; it is not used")
    magic, version, flags, zero, length, salt = _FIXED.unpack_from(raw)
    fixed, check, data = raw[: _FIXED.size], raw[_FIXED.size : BLOB_HEAD_BYTES], raw[BLOB_HEAD_BYTES:]
    if (magic, version, flags, zero, length) != (_MAGIC, 1, int(keyring is not None), 0, len(data)):
        raise CorruptEntry(f"blob {name} has an unknown start, version {version}, or a wrong length; it is not used")
    place = _place(owner, name)
    if keyring is not None:
        return keyring.cipher(owner[0].name, place, salt).open(0, data + check, fixed)
    if _check(place, fixed, data) != check:
        raise CorruptEntry(f"blob {name} fails its checksum; it is not used")
    return data


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Named tensors as safetensors bytes."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def unpack_tensors(data: bytes, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """The named tensors, copied. Raises CorruptEntry unless names, dtypes and shapes are just the expected ones."""
    try:
        found = load(data)
    except (SafetensorError, ValueError) as error:
        raise CorruptEntry(f"statistics are not safetensors: {str(error)[:200]}; they are not used") from error
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    if described != dict(expected):
        raise CorruptEntry(f"statistics hold {str(described)[:300]}, expected {str(dict(expected))[:300]}; not used")
    return {name: tensor.clone() for name, tensor in found.items()}


def _place(owner: Owner, name: str) -> bytes:
    namespace, fingerprint = owner
    return bytes.fromhex(digest_fields(b"blob", namespace.name.encode(), fingerprint.digest.encode(), name.encode()))


def _check(place: bytes, fixed: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(fixed + data, seed=xxhash.xxh3_64_intdigest(place))
