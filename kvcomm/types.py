"""The nouns shared by all modules: namespaces, fingerprints, segments and their KV."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch

from kvcomm.checks import need
from kvcomm.errors import InvalidInput

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_TOKEN_ID = 2**32 - 1
TOKEN_BYTES = 4


def digest_fields(*parts: bytes) -> str:
    """SHA-256 hex digest of length-prefixed fields, so that no two lists of fields collide by joining."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids, each as a little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def digest_tokens(token_ids: Sequence[int]) -> str:
    """SHA-256 hex digest of token ids, packed."""
    return digest_fields(b"tokens", pack_tokens(token_ids))


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant, or the operator's own ``public``. Part of every key, pool, index and quota.

    Raises:
        InvalidInput: the name is empty, longer than 128 characters or has other than ``[A-Za-z0-9._-]``.
    """

    name: str

    def __post_init__(self) -> None:
        need(self.name, str, "namespace", "give a name of letters, digits, dots, dashes and underscores")
        if not _NAMESPACE.fullmatch(self.name):
            raise InvalidInput(
                f"namespace {self.name[:140]!r} is not 1 to 128 characters of [A-Za-z0-9._-] starting with a "
                "letter or digit; choose such a name"
            )

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ModelFingerprint:
    """Everything that changes KV for the same tokens. KV is never used under another fingerprint.

    Attributes:
        architecture: model class and the parts of its configuration that shape attention.
        weights: SHA-256 of all parameters.
        rope: digest of the rotary parameters of each layer.
        dtype: the KV's dtype, for example ``float32``.
        adapter: name and digest of an active adapter, or the empty string.
        tokenizer: SHA-256 of the vocabulary and its rules.
        n_layers, n_kv_heads, head_dim: the KV's shape, [n_layers, n_kv_heads, tokens, head_dim].
    """

    architecture: str
    weights: str
    rope: str
    dtype: str
    adapter: str
    tokenizer: str
    n_layers: int
    n_kv_heads: int
    head_dim: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex digest over all fields."""
        return digest_fields(b"fingerprint", *(str(getattr(self, f.name)).encode() for f in fields(self)))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The KV's torch dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"fingerprint names dtype {self.dtype!r}, which is not a torch dtype")
        return dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values for one token."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Segment:
    """A run of token ids with an identity of its own; its content digest is its name.

    Raises:
        InvalidInput: a token id is negative or does not fit 32 bits.
    """

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        need(self.token_ids, Iterable, "token_ids", "pass ids as the tokenizer returns them")
        object.__setattr__(self, "token_ids", tuple(self.token_ids))  # a list would neither hash nor compare
        for position, token in enumerate(self.token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
                raise InvalidInput(
                    f"token id {token!r} at index {position} is not an integer of 0 to {MAX_TOKEN_ID}; "
                    "pass ids as the tokenizer returns them"
                )

    @classmethod
    def from_bytes(cls, data: bytes) -> Segment:
        """The segment of token ids stored as little-endian uint32s, which are in range by their nature."""
        if len(data) % 4:
            raise InvalidInput(f"{len(data)} bytes are no whole number of 4-byte token ids; pass all of them")
        segment = object.__new__(cls)
        segment.__dict__.update(
            token_ids=struct.unpack(f"<{len(data) // 4}I", data), digest=digest_fields(b"tokens", data)
        )
        return segment

    @cached_property
    def digest(self) -> str:
        """Content digest (SHA-256 hex) of the token ids."""
        return digest_tokens(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class SegmentKV:
    """Keys and values of a segment, keys in the unrotated frame (attention factor kept).

    Attributes:
        keys: [n_layers, n_kv_heads, tokens, head_dim].
        values: same shape and dtype as ``keys``.

    Raises:
        InvalidInput: the two tensors do not have one shape of four dimensions, one dtype and one device.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        k, v = self.keys, self.values
        if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise InvalidInput(
                f"keys {tuple(k.shape)} {k.dtype} on {k.device} and values {tuple(v.shape)} {v.dtype} on {v.device} "
                "must agree and have shape [layers, kv heads, tokens, head dim]"
            )

    def __len__(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def device(self) -> torch.device:
        """Where both lie."""
        return self.keys.device

    @property
    def finite(self) -> bool:
        """Whether no number is NaN or infinite: seen in the sums, in one pass and without a mask."""
        return all(math.isfinite(float(part.sum(dtype=torch.float32))) for part in (self.keys, self.values))

    def check(self, fingerprint: ModelFingerprint, tokens: int) -> None:
        """Raise InvalidInput unless shape and dtype are those of ``fingerprint`` for ``tokens`` tokens."""
        want = (fingerprint.n_layers, fingerprint.n_kv_heads, tokens, fingerprint.head_dim)
        if tuple(self.keys.shape) != want or self.keys.dtype != fingerprint.torch_dtype:
            raise InvalidInput(
                f"KV of shape {tuple(self.keys.shape)} {self.keys.dtype} does not fit the model, which has "
                f"{want} {fingerprint.torch_dtype}; compute it again with this model"
            )
