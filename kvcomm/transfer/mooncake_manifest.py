"""The small object, written last, that makes a value be there: how many parts it has and what they are called."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, replace

import xxhash

from kvcomm.errors import CorruptEntry
from kvcomm.store.base import Priority
from kvcomm.store.seal import TAG_BYTES, Keyring
from kvcomm.transfer.mooncake_config import MAX_PART_BYTES, MIN_PART_BYTES

_MAGIC = b"\x89KVM\r\n\x1a\n"
_FIXED = struct.Struct("<8sHBBIQ16sd32s")
_SEALED = 1
MAX_VALUE_BYTES = 2**42


@dataclass(frozen=True, slots=True)
class Manifest:
    """One value in the cluster.

    Attributes:
        nbytes: of the value.
        part_bytes: of each part but the last.
        tag: 16 random bytes of this put; the parts' names are made of it, so two puts never mix.
        priority: eviction class that it was put with.
        expires_s: Unix time at which the value ends, or None.
    """

    nbytes: int
    part_bytes: int
    tag: bytes
    priority: Priority
    expires_s: float | None

    @classmethod
    def new(cls, nbytes: int, part_bytes: int, priority: Priority, expires_s: float | None) -> Manifest:
        """For a value that is about to be put."""
        return cls(nbytes, part_bytes, secrets.token_bytes(16), priority, expires_s)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        whole, rest = divmod(self.nbytes, self.part_bytes)
        return [self.part_bytes] * whole + [rest] * bool(rest)

    def part_names(self, prefix: str) -> list[str]:
        """Names of the parts' objects; they tell nothing, not even which value they are of."""
        return [f"{prefix}{self.tag.hex()}.{number}" for number in range(len(self.sizes))]

    def until(self, expires_s: float) -> Manifest:
        """The same value with a later end, if it has one."""
        return self if self.expires_s is None else replace(self, expires_s=max(self.expires_s, expires_s))

    def encode(self, namespace: str, name: str, keyring: Keyring | None) -> bytes:
        """The object under ``name`` (64 hex digits). With a keyring its check is AES-GCM's tag, bound to the name."""
        flags, ends = int(keyring is not None), self.expires_s or 0.0
        fixed = _FIXED.pack(
            _MAGIC, 1, flags, self.priority, self.part_bytes, self.nbytes, self.tag, ends, secrets.token_bytes(32)
        )  # fmt: skip
        return fixed + _check(fixed, namespace, name, keyring)


def decode_manifest(data: bytes, namespace: str, name: str, keyring: Keyring | None) -> Manifest:
    """Check and read one. Raises CorruptEntry."""
    if len(data) != _FIXED.size + TAG_BYTES:
        raise CorruptEntry(f"a manifest has {_FIXED.size + TAG_BYTES} bytes, not {len(data)}; the entry is not used")
    fixed, check = data[: _FIXED.size], data[_FIXED.size :]
    magic, version, flags, priority, part_bytes, nbytes, tag, ends, salt = _FIXED.unpack(fixed)
    if (magic, version, flags) != (_MAGIC, 1, _SEALED if keyring is not None else 0):
        raise CorruptEntry(f"manifest of version {version}, flags {flags} in this store; the entry is not used")
    if keyring is None:
        if check != _check(fixed, namespace, name, None):
            raise CorruptEntry("a manifest fails its checksum; the entry is not used")
    else:
        keyring.cipher(namespace, bytes.fromhex(name), salt).open(0, check, fixed)
    if (
        not MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES
        or not 0 < nbytes <= MAX_VALUE_BYTES
        or not ends >= 0
        or priority > max(Priority)
    ):
        raise CorruptEntry(f"a manifest names {nbytes} bytes in parts of {part_bytes}; the entry is not used")
    return Manifest(nbytes, part_bytes, tag, Priority(priority), ends or None)


def _check(fixed: bytes, namespace: str, name: str, keyring: Keyring | None) -> bytes:
    if keyring is None:
        return xxhash.xxh3_128_digest(fixed, seed=xxhash.xxh3_64_intdigest(name.encode()))
    return keyring.cipher(namespace, bytes.fromhex(name), fixed[-32:]).seal(0, b"", fixed)
