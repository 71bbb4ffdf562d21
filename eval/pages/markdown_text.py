"""Texts that come out of results files, made harmless in Markdown: no HTML, no line of their own, no further column."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """``text`` on one line, without HTML."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(str(text).splitlines()))


def cell(text: str) -> str:
    """``text`` as a cell of a table."""
    return re.sub(r"(\\*)\|", lambda found: found[1] * 2 + r"\|", plain(text))


def code(text: str) -> str:
    """``text`` as code on one line, whatever backticks are in it."""
    line = " ".join(str(text).splitlines())
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}"
