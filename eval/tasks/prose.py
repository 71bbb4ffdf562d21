"""Real prose for documents: what Python itself carries, its language reference (``pydoc_data.topics``) before all."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvcomm.errors import InvalidInput

_RULE = re.compile(r"^[*=~^\"'-]{3,}$")
_BULLET = re.compile(r"^\s*(?:[*•-]|\d+\.)\s+")


@cache
def topics() -> dict[str, list[str]]:
    """Topic name to its paragraphs as plain sentences: no headings' rules, no markup stars, no grammar or code blocks.

    A paragraph that stands in several topics is kept in the first.

    The text is that of the running Python's version: compare runs under one version only. Treat as read-only.
    """
    from pydoc_data.topics import topics as raw

    cleaned: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, text in sorted(raw.items()):
        fresh = [paragraph for paragraph in _paragraphs(text) if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            cleaned[name] = list(dict.fromkeys(fresh))
    return cleaned


def _paragraphs(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n", text)
    paragraphs = []
    for block in blocks:
        lines = block.splitlines()
        if any(_RULE.match(line) for line in lines) or not block.strip():
            continue
        joined = " ".join(_BULLET.sub("", line).strip() for line in lines)
        joined = re.sub(r"(?<=\w)- (?=[a-z])", "-", joined)  # a word broken at its hyphen
        joined = re.sub(r"\*{1,2}([^*\s][^*]*)\*{1,2}|[`]{1,2}([^`]+)[`]{1,2}", r"\1\2", joined)
        if len(joined.split()) >= 12 and joined[0].isupper() and joined.rstrip(")\"”’'")[-1:] in {".", ":", ";"}:
            paragraphs.append(joined.rstrip(":;") + ("" if joined.endswith(".") else "."))
    return paragraphs


def sections(words: int) -> list[tuple[str, str]]:
    """All passages of ``words`` words or a few more that share no paragraph, each behind its topic's name, in order."""
    return [(name, text) for name, paragraphs in topics().items() for text in _grouped(paragraphs, words)]


def docstrings(words: int, seed: int = 0) -> Iterator[str]:
    """More passages for those who need many: docstrings of the standard library's modules, read and not imported.

    No two share a paragraph. ``seed`` chooses the order of the modules.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng = random.Random(seed)
    seen: set[str] = set()
    for path in rng.sample(files, len(files)):
        tree = ast.parse(path.read_bytes())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        fresh = [paragraph for text in texts for paragraph in _paragraphs(text) if paragraph not in seen]
        seen.update(fresh)
        yield from _grouped(list(dict.fromkeys(fresh)), words)


def _grouped(paragraphs: list[str], words: int) -> list[str]:
    """Neighbouring paragraphs' sentences joined to ``words`` words or a few more; what is too little is dropped."""
    found: list[str] = []
    held: list[str] = []
    for paragraph in paragraphs:
        held.extend(sentences(paragraph))
        if sum(len(sentence.split()) for sentence in held) >= words:
            found.append(_trim(held, words))
            held = []
    return found


def sentences(text: str) -> list[str]:
    """``text`` cut behind the marks that end its sentences."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z“(])", text)


def passages(words: int, count: int, seed: int = 0) -> list[str]:
    """``count`` passages that share no paragraph, each of ``words`` words or a few more (whole sentences where it can).

    Args:
        words: length of a passage, at least 1.
        count: how many, at least 0.
        seed: chooses which, and their order.

    Raises:
        InvalidInput: a number is out of range, or Python's reference has not enough text.
    """
    if words < 1 or count < 0:
        raise InvalidInput(f"words={words} and count={count} must be at least 1 and 0")
    found = [text for _, text in sections(words)]
    if len(found) < count:
        raise InvalidInput(
            f"Python's reference has {len(found)} passages of {words} words, {count} were asked for; ask for fewer "
            "or shorter ones"
        )
    return random.Random(seed).sample(found, count)


def _trim(held: list[str], words: int) -> str:
    """The first sentences that reach ``words`` words."""
    kept, total = [], 0
    for sentence in held:
        kept.append(sentence)
        total += len(sentence.split())
        if total >= words:
            break
    return " ".join(kept)
