"""Strict reading of a header's members: each has one type and a limit, and none may be left over."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from kvcomm.errors import ProtocolError

MAX_TEXT = 4096
_HEX = re.compile(r"[0-9a-f]*")


class Members:
    """Members of one JSON object. Read all of them, then call ``end``. Every method raises ProtocolError."""

    def __init__(self, found: Mapping[str, object], what: str = "header") -> None:
        self._left = dict(found)
        self._what = what

    def text(self, name: str, limit: int = MAX_TEXT) -> str:
        """Text of at most ``limit`` characters."""
        value = self.take(name)
        if not isinstance(value, str) or len(value) > limit:
            raise self._wrong(name, value, f"text of up to {limit} characters")
        if not _encodes(value):
            raise ProtocolError(f"{self._what} member {name} holds half a character; the call is refused")
        return value

    def digest(self, name: str, length: int = 64) -> str:
        """``length`` lower-case hex digits."""
        value = self.text(name, length)
        if len(value) != length or not _HEX.fullmatch(value):
            raise self._wrong(name, value, f"{length} lower-case hex digits")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """As ``integer``, or None for null."""
        if self._left.get(name, 0) is None:
            self.take(name)
            return None
        return self.integer(name, low, high)

    def number(self, name: str) -> float:
        """A finite number."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """As ``number``, or None for null."""
        if self._left.get(name, 0) is None:
            self.take(name)
            return None
        return self.number(name)

    def truth(self, name: str) -> bool:
        """True or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def members(self, name: str) -> Members:
        """A member that is an object itself."""
        value = self.take(name)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Members(value, f"{self._what}.{name}")

    def integers(self, name: str, low: int, high: int, count: int) -> list[int]:
        """At most ``count`` whole numbers from ``low`` to ``high``."""
        value = self.take(name)
        if not isinstance(value, list) or len(value) > count:
            raise self._wrong(name, value, f"a list of up to {count} numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self._wrong(name, item, f"whole numbers from {low} to {high}")
        return value

    def texts(self, name: str, limit: int, count: int) -> list[str]:
        """At most ``count`` texts of at most ``limit`` characters."""
        value = self.take(name)
        if not isinstance(value, list) or len(value) > count:
            raise self._wrong(name, value, f"a list of up to {count} texts")
        for item in value:
            if not isinstance(item, str) or len(item) > limit or not _encodes(item):
                raise self._wrong(name, item, f"texts of up to {limit} characters")
        return value

    def integers_by_name(self) -> dict[str, int]:
        """All members that are left, each a whole number of at least 0."""
        return {name: self.integer(name, 0, 2**63) for name in list(self._left)}

    def end(self) -> None:
        """Refuse members that nobody read."""
        if self._left:
            raise ProtocolError(f"{self._what} has unknown members {sorted(self._left)[:5]}; update kvcomm")

    def take(self, name: str) -> object:
        """A member of any type; the caller checks it."""
        if name not in self._left:
            raise ProtocolError(f"{self._what} lacks {name!r}; update kvcomm")
        return self._left.pop(name)

    def _wrong(self, name: str, value: object, wanted: str) -> ProtocolError:
        return ProtocolError(f"{self._what} member {name} is {str(value)[:40]!r}, not {wanted}; the call is refused")


def _encodes(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON can name and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
