"""What followers are told, and nearly equal texts, as JSON lines of a payload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcomm.errors import ProtocolError
from kvcomm.keys import CacheKey
from kvcomm.store.base import MAX_GROUP_CHARS, MAX_TOKENS
from kvcomm.store.coordinator import Nearby
from kvcomm.transfer.names import MAX_KEY_CHARS, PAGE_BYTES, key_text, read_key
from kvcomm.transfer.schema import Members
from kvcomm.types import Namespace, Segment

_CUT_BYTES = 4 << 20
MAX_TEXTS_TOKENS = 4 << 20
MAX_KEYS = 1024
_WHAT = frozenset(("added", "removed", "dropped"))


@dataclass(frozen=True, slots=True)
class News:
    """One thing that happened: ``key`` of what was added or removed, ``group`` of what was added or dropped."""

    what: str
    key: CacheKey | None
    group: str


def change_lines(changes: Iterable[News]) -> Iterator[bytes]:
    """JSON lines, joined to pages of about 256 KiB; one empty page where there are none."""
    page = bytearray()
    for change in changes:
        key = "" if change.key is None else key_text(change.key)
        page += _line({"what": change.what, "key": key, "group": change.group})
        if len(page) >= PAGE_BYTES:
            yield bytes(page)
            page.clear()
    yield bytes(page)


def read_changes(page: bytes | bytearray, namespace: Namespace) -> list[News]:
    """What ``change_lines`` made. Raises ProtocolError."""
    found = []
    for item in _objects(page, "news"):
        what, key, group = item.text("what", 16), item.text("key", MAX_KEY_CHARS), item.text("group", MAX_GROUP_CHARS)
        item.end()
        if what not in _WHAT or (what == "dropped") != (key == ""):
            raise ProtocolError(f"news {what[:16]!r} with a key of {len(key)} characters are unknown; update kvcomm")
        found.append(News(what, read_key(key, namespace) if key else None, group))
    return found


def nearby_pages(found: Iterable[Nearby]) -> Iterator[memoryview]:
    """JSON lines, cut to pages of 4 MiB wherever they end; texts beyond 4 Mi tokens in all are left out."""
    lines, tokens = bytearray(), 0
    for near in found:
        tokens += len(near.segment)
        if tokens > MAX_TEXTS_TOKENS:
            break
        keys = [key_text(key) for key in near.keys[:MAX_KEYS]]
        lines += _line({"ids": near.segment.token_ids, "cosine": near.cosine, "keys": keys})
    whole = memoryview(bytes(lines))
    return (whole[at : at + _CUT_BYTES] for at in range(0, len(whole), _CUT_BYTES))


def read_nearby(data: bytes | bytearray, namespace: Namespace) -> list[Nearby]:
    """What the pages of ``nearby_pages`` hold together. Raises ProtocolError."""
    found = []
    for item in _objects(data, "text"):
        segment = Segment(tuple(item.integers("ids", 0, 2**32 - 1, MAX_TOKENS)))
        cosine = item.number("cosine")
        keys = tuple(read_key(text, namespace) for text in item.texts("keys", MAX_KEY_CHARS, MAX_KEYS))
        item.end()
        if any(key.content != segment.digest for key in keys):
            raise ProtocolError("a nearly equal text came with keys of another one; it is not used")
        found.append(Nearby(segment, cosine, keys))
    return found


def _line(item: dict[str, object]) -> bytes:
    return json.dumps(item, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _objects(page: bytes | bytearray, what: str) -> Iterator[Members]:
    for line in bytes(page).splitlines():
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        if not isinstance(item, dict):
            raise ProtocolError(f"a line of {what} is no JSON object; the connection is closed")
        yield Members(item, what)
