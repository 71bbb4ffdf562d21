"""Texts that come out of results files, made harmless in Markdown and terminals.

No HTML, no link or image, no control character, no line of their own, no further column.
"""

from __future__ import annotations

import re


def line(text: str) -> str:
    """``text`` on one line; what would not be seen, or would steer a terminal, is written as an escape."""
    joined = " ".join(str(text).splitlines())
    return "".join(c if c.isprintable() or c.isspace() and c != "\x1f" else ascii(c)[1:-1] for c in joined)


def plain(text: str) -> str:
    """``text`` on one line, without HTML, links and images."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line(text).replace("](", "]\\("))


def cell(text: str) -> str:
    """``text`` as a cell of a table."""
    return re.sub(r"(\\*)\|", lambda found: found[1] * 2 + r"\|", plain(text))


def code(text: str) -> str:
    """``text`` as code on one line, whatever backticks are in it."""
    found = line(text)
    fence = "`" * (max(map(len, re.findall("`+", found)), default=0) + 1)
    padding = " " if found.startswith("`") or found.endswith("`") else ""
    return f"{fence}{padding}{found}{padding}{fence}"
