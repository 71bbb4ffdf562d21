"""One tree of errors. Each message names the value, the limit and the remedy."""

from __future__ import annotations


class KVCommError(Exception):
    """Everything that kvcomm raises on purpose derives from this."""


class InvalidInput(KVCommError, ValueError):
    """A caller's argument is outside what the function accepts; nothing was changed."""


class PromptTooLong(InvalidInput):
    """Prompt plus requested new tokens exceed the model's positions."""


class FingerprintMismatch(InvalidInput):
    """KV, a pool or a file belongs to another model, dtype, adapter or tokenizer."""


class UnsupportedModel(KVCommError):
    """The model has a part that cannot be reused correctly; the message names it."""


class StoreError(KVCommError):
    """A storage tier could not do what was asked."""


class CorruptEntry(StoreError):
    """Stored bytes failed verification; they were set aside and never served."""


class StoreUnavailable(StoreError):
    """The tier is closed, full, unreachable or past its deadline."""


class StoreFull(StoreUnavailable):
    """The tier has no room for the entry and may not, or could not, make any."""


class DeadlineExceeded(StoreUnavailable):
    """The wait for a tier ended at its deadline, before an answer."""


class Overloaded(StoreUnavailable):
    """A service has as much to do as it may take on; nothing was done, try again later."""


class ProtocolError(StoreUnavailable):
    """The other side of a connection sent what the protocol does not allow; the connection was closed."""


class AccessDenied(StoreError):
    """The token is missing, unknown, expired or revoked, or lacks the right that the call needs."""


class Superseded(StoreError):
    """A node's epoch is not its present one: it was opened again elsewhere, or what it knew was forgotten."""
