"""Keys and listings as members of a header. The namespace is never among them: it comes from the token."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from functools import lru_cache

from kvcomm.errors import InvalidInput, ProtocolError
from kvcomm.keys import CacheKey, Origin, Recipe
from kvcomm.store.base import MAX_GROUP_CHARS, MAX_TOKENS, Attributes, Listing, Priority
from kvcomm.store.format import MAX_LAYERS, MAX_WIDTH
from kvcomm.transfer.schema import Members
from kvcomm.types import ModelFingerprint, Namespace

_TEXTS = ("architecture", "weights", "rope", "dtype", "adapter", "tokenizer")
_ORIGINS: dict[str, Origin] = {"prompt": "prompt", "decode": "decode", "isolated": "isolated"}
MAX_NBYTES = 2**40
MAX_KEY_CHARS = 32768
PAGE_BYTES = 256 << 10
MAX_LOOKED_UP = 256
MAX_LOOK_UP_BYTES = 1 << 20


@lru_cache(maxsize=256)
def fingerprint_text(fingerprint: ModelFingerprint) -> str:
    """A fingerprint's nine fields as JSON text."""
    return _json({f.name: getattr(fingerprint, f.name) for f in fields(fingerprint)})


@lru_cache(maxsize=256)
def read_fingerprint(text: str) -> ModelFingerprint:
    """What ``fingerprint_text`` made. Raises ProtocolError."""
    found = _members(text, "fingerprint")
    architecture, weights, rope, dtype, adapter, tokenizer = (found.text(name, 512) for name in _TEXTS)
    layers, heads = found.integer("n_layers", 1, MAX_LAYERS), found.integer("n_kv_heads", 1, MAX_WIDTH)
    width = found.integer("head_dim", 1, MAX_WIDTH)
    model = ModelFingerprint(architecture, weights, rope, dtype, adapter, tokenizer, layers, heads, width)
    found.end()
    try:
        _ = model.torch_dtype
    except InvalidInput as error:
        raise ProtocolError(str(error)) from None
    return model


@lru_cache(maxsize=4096)
def key_text(key: CacheKey) -> str:
    """A key without its namespace as JSON text. One text is one key, so that both sides need to parse it once only."""
    return _json(
        {"fingerprint": fingerprint_text(key.fingerprint), "content": key.content, "recipe": asdict(key.recipe)}
    )


@lru_cache(maxsize=4096)
def read_key(text: str, namespace: Namespace) -> CacheKey:
    """What ``key_text`` made, in ``namespace``. Raises ProtocolError."""
    found = _members(text, "key")
    model, content = read_fingerprint(found.text("fingerprint")), found.digest("content")
    how = found.members("recipe")
    found.end()
    origin = _ORIGINS.get(how.text("origin", 16))
    if origin is None:
        raise ProtocolError(f"a recipe's origin is none of {', '.join(_ORIGINS)}; update kvcomm")
    recipe = Recipe(origin, how.text("context"), how.text("preceding", 256), how.truth("exact"))
    how.end()
    return CacheKey(namespace, model, content, recipe)


def look_ups(keys: Iterable[CacheKey]) -> Iterator[tuple[int, bytes]]:
    """Keys as lines, cut to payloads that one look-up may have; how many are in each, and the payload."""
    count, page = 0, bytearray()
    for key in keys:
        line = key_text(key).encode() + b"\n"
        if count == MAX_LOOKED_UP or (count and len(page) + len(line) > MAX_LOOK_UP_BYTES):
            yield count, bytes(page)
            count, page = 0, bytearray()
        count += 1
        page += line
    if count:
        yield count, bytes(page)


def read_look_up(page: bytes | bytearray, namespace: Namespace) -> list[CacheKey]:
    """The keys of a payload of ``look_ups``, in ``namespace``. Raises ProtocolError."""
    count = page.count(b"\n")
    if not page.endswith(b"\n") or count > MAX_LOOKED_UP:
        raise ProtocolError(f"a look-up is no 1 to {MAX_LOOKED_UP} whole lines but {count}; the call is refused")
    lines = bytes(page).split(b"\n")[:-1]
    if any(len(line) > MAX_KEY_CHARS for line in lines):
        raise ProtocolError(f"a look-up has a key of more than {MAX_KEY_CHARS} bytes; the call is refused")
    try:
        return [read_key(line.decode("ascii"), namespace) for line in lines]
    except UnicodeDecodeError:
        raise ProtocolError("a look-up has a key that is not ASCII; the call is refused") from None


def milliseconds(seconds: float | None) -> int | None:
    """Whole milliseconds, at least 1; None stays."""
    return None if seconds is None else max(1, math.ceil(min(seconds, 1e9) * 1000))


def left_ms(expires_s: float | None) -> int | None:
    """A Unix time as milliseconds from now, which another machine's clock cannot change; None stays."""
    return None if expires_s is None else milliseconds(expires_s - time.time())


def listing_lines(listings: Iterable[Listing]) -> Iterator[bytes]:
    """JSON lines, joined to pages of about 256 KiB."""
    page = bytearray()
    for entry in listings:
        kept = entry.attributes
        line = {
            "key": key_text(entry.key), "tokens": entry.tokens, "nbytes": entry.nbytes, "encoding": entry.encoding,
            "priority": int(kept.priority), "group": kept.group, "ttl_s": kept.ttl_s, "created_s": entry.created_s,
            "expires_s": entry.expires_s,
        }  # fmt: skip
        page += json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(page) >= PAGE_BYTES:
            yield bytes(page)
            page.clear()
    yield bytes(page)


def read_listings(page: bytes, namespace: Namespace, now_s: float) -> list[Listing]:
    """What ``listing_lines`` made, at ``now_s`` by the service's clock. Raises ProtocolError.

    Times are moved by the whole seconds that the two clocks differ.
    """
    ahead_s = float(round(time.time() - now_s))
    try:
        found = [json.loads(line) for line in page.splitlines()]
    except (ValueError, RecursionError):
        raise ProtocolError("a page of listings is no JSON; the connection is closed") from None
    return [_listing(Members(item, "listing"), namespace, ahead_s) for item in found if _is_object(item)]


def _is_object(item: object) -> bool:
    if not isinstance(item, dict):
        raise ProtocolError(f"a listing is a {type(item).__name__}, no object; the connection is closed")
    return True


def _listing(found: Members, namespace: Namespace, ahead_s: float) -> Listing:
    key = read_key(found.text("key", MAX_KEY_CHARS), namespace)
    tokens, nbytes = found.integer("tokens", 1, MAX_TOKENS), found.integer("nbytes", 0, MAX_NBYTES)
    encoding, priority = found.text("encoding", 16), Priority(found.integer("priority", 0, max(Priority)))
    attributes = Attributes(priority, found.text("group", MAX_GROUP_CHARS), found.optional_number("ttl_s"))
    created, expires = found.number("created_s") + ahead_s, found.optional_number("expires_s")
    found.end()
    ends = None if expires is None else expires + ahead_s
    return Listing(key, tokens, nbytes, encoding, attributes, created, ends)


def _json(found: dict[str, object]) -> str:
    return json.dumps(found, separators=(",", ":"))


def _members(text: str, what: str) -> Members:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ProtocolError(f"a {what} is no JSON object; the call is refused")
    return Members(found, what)
