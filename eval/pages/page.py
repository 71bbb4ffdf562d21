"""A self-contained HTML page: no requests, light and dark, desktop and phone; at most a script that sorts."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

_CSS = Path(__file__).with_name("page.css")
_SORT = Path(__file__).with_name("page_sort.js")


def page(title: str, lead: str, sections: Sequence[str], sorts: bool = False) -> str:
    """The whole document. ``title`` and ``lead`` are text, ``sections`` are HTML made by the functions below.

    Args:
        sorts: whether the page carries the script that sorts tables; its policy then allows that script and no other.
    """
    style = _CSS.read_text(encoding="utf-8")
    script = _SORT.read_text(encoding="utf-8") if sorts else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"; script-src 'sha256-{digest}'" if sorts else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'"
        f'{allowed}">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>\n'
        + "\n".join(sections)
        + f"\n</main>{f'<script>{script}</script>' if sorts else ''}</body></html>\n"
    )


def tiles(entries: Sequence[tuple[str, str, str]], heading: str = "") -> str:
    """The few numbers that matter: ``(number, what it is, in comparison to what)``; nothing where there are none."""
    if not entries:
        return ""
    cells = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span><small>{escape(against)}</small></div>'
        for number, what, against in entries
    )
    head = f"<h2>{escape(heading)}</h2>" if heading else ""
    return f'<section>{head}<div class="tiles">{cells}</div></section>'


def word_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Headed lists of sentences, side by side where there is room."""
    cells = "".join(
        f"<div><h2>{escape(heading)}</h2><ul>{''.join(f'<li>{_code(line)}</li>' for line in lines)}</ul></div>"
        for heading, lines in columns
    )
    return f'<section class="words">{cells}</section>'


def _code(line: str) -> str:
    """A sentence as HTML; a command behind ``: `` is set as code."""
    text, mark, command = line.partition(": python -m ")
    return f"{escape(text)}:<code>{unbroken('python -m ' + command)}</code>" if mark else escape(line)


def unbroken(command: str) -> str:
    """A command as HTML that breaks between its words only, not at their hyphens."""
    return " ".join(f"<span>{escape(word)}</span>" if len(word) < 40 else escape(word) for word in command.split(" "))


def figures(entries: Sequence[tuple[str, str, str]]) -> str:
    """Plots with a heading and a sentence each: ``(heading, HTML of the plot, caption)``."""
    cells = "".join(
        f"<figure><h2>{escape(heading)}</h2>{plot}<figcaption>{escape(caption)}</figcaption></figure>"
        for heading, plot, caption in entries
    )
    return f'<section class="figures">{cells}</section>'


def table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """A table that scrolls sideways by itself where it is too wide; the first column names the row."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    after = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<section><h2>{escape(heading)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(heading)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{after}</section>"
    )


def sortable(heading: str, columns: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], note: str = "") -> str:
    """A table whose headings sort it; a cell is its text and what it is sorted by, empty always last.

    A column that is sorted as words is set as words.
    """
    prose = [any(not _number(row[n][1]) for row in rows) for n in range(len(columns))]
    css = [' class="prose"' if words else "" for words in prose]
    head = "".join(f'<th scope="col"{css[n]}><button>{escape(name)}</button></th>' for n, name in enumerate(columns))
    body = "".join(
        f'<tr><th scope="row" data-v="{escape(row[0][1])}">{escape(row[0][0])}</th>'
        + "".join(
            f'<td data-v="{escape(value)}"{css[n]}>{escape(text) if prose[n] else _stacked(text)}</td>'
            for n, (text, value) in enumerate(row[1:], 1)
        )
        + "</tr>"
        for row in rows
    )
    after = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<section><h2>{escape(heading)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(heading)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{after}</section>"
    )


def _number(text: str) -> bool:
    """Whether it is a number, or nothing."""
    try:
        return not text or math.isfinite(float(text))
    except ValueError:
        return False


def _stacked(text: str) -> str:
    """A figure over its interval: ``value (interval)`` as two lines."""
    value, mark, rest = text.partition(" (")
    return f"{escape(value)}<small>{escape(rest.removesuffix(')'))}</small>" if mark and rest else escape(text)


def facts(heading: str, entries: Sequence[tuple[str, str]], command: str = "") -> str:
    """Pairs of name and value, and the command that repeats the run."""
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
    repeat = f"<pre><code>{unbroken(command)}</code></pre>" if command else ""
    return f"<section><h2>{escape(heading)}</h2>{repeat}<dl>{pairs}</dl></section>"
