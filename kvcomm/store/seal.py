"""Optional sealing: names, headers and frames under keys of a namespace. The derivation is in docs/format.md."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Protocol

from kvcomm.errors import CorruptEntry, InvalidInput
from kvcomm.types import digest_fields

MASTER_BYTES = 32
TAG_BYTES = 16


class EntryCipher(Protocol):
    """Seals the parts of one file. Part 0 is the header, part n + 1 is frame n."""

    def seal(self, part: int, data: bytes, bound: bytes) -> bytes:
        """Ciphertext and a 16-byte tag; ``bound`` must be given again to open it."""
        ...

    def open(self, part: int, data: bytes, bound: bytes) -> bytes:
        """The plaintext. Raises CorruptEntry if anything differs."""
        ...

    def open_into(self, part: int, data: memoryview, bound: bytes, out: memoryview) -> None:
        """As ``open``, into ``out``, which has as many bytes as ``data`` less the tag."""
        ...


class _AesGcm:
    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)

    def seal(self, part: int, data: bytes, bound: bytes) -> bytes:
        return self._aead.encrypt(part.to_bytes(12, "little"), data, bound)

    def open(self, part: int, data: bytes, bound: bytes) -> bytes:
        out = bytearray(max(0, len(data) - TAG_BYTES))
        self.open_into(part, memoryview(data), bound, memoryview(out))
        return bytes(out)

    def open_into(self, part: int, data: memoryview, bound: bytes, out: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(part.to_bytes(12, "little"), data, bound, out)
        except InvalidTag:
            raise CorruptEntry(f"part {part} failed AES-GCM authentication; it is not used") from None


def _derive(secret: bytes, salt: bytes | None, info: bytes) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise InvalidInput("sealing needs the cryptography package; install kvcomm[seal]") from error
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)


@dataclass(frozen=True)
class Keyring:
    """Keys of every namespace, derived from one master secret of 32 bytes. Shows nothing of it in ``repr``.

    Raises:
        InvalidInput: the secret does not have 32 bytes, or cryptography is not installed.
    """

    master: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.master) != MASTER_BYTES:
            raise InvalidInput(f"master secret has {len(self.master)} bytes, not {MASTER_BYTES}; make a new one")
        _derive(self.master, None, b"kvcomm/1/probe")

    def _namespace(self, namespace: str) -> bytes:
        return _derive(self.master, None, b"kvcomm/1/namespace/" + namespace.encode())

    def opaque(self, namespace: str, text: str) -> str:
        """HMAC of ``text``, 64 hex digits: a name that tells nothing to those without the key."""
        key = _derive(self._namespace(namespace), None, b"kvcomm/1/name")
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def cipher(self, namespace: str, name: bytes, salt: bytes) -> EntryCipher:
        """The cipher of the one file with this name and salt."""
        return _AesGcm(_derive(self._namespace(namespace), salt, b"kvcomm/1/entry/" + name))

    def proof(self) -> str:
        """A value that only the same master secret gives; it does not give the secret away."""
        return _derive(self.master, None, b"kvcomm/1/proof").hex()


def opaque(keyring: Keyring | None, namespace: str, text: str) -> str:
    """Name for ``text`` as it may appear on disk: HMAC if sealed, else SHA-256."""
    if keyring is None:
        return digest_fields(b"label", namespace.encode(), text.encode())
    return keyring.opaque(namespace, text)
