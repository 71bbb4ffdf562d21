"""How long does it take to look up a neighbour, to match two texts, and to keep the index? On one core.

OMP_NUM_THREADS=1 python benchmarks/index.py --out results/bench-index.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any

from kvcomm.anchors.index import EXACT_UP_TO, NeighbourIndex, sketch
from kvcomm.anchors.match import MIN_RUN, match
from kvcomm.types import Segment

TOKENS = 300
WORDS = 49152


def words(random: Random, count: int) -> list[int]:
    """Token ids as text has them: a few very often, most seldom (Zipf)."""
    return [int(WORDS ** random.random()) - 1 for _ in range(count)]


def edited(random: Random, ids: list[int], edits: int) -> list[int]:
    """``ids`` with runs of 0 to 3 tokens replaced by 0 to 3 others."""
    text = list(ids)
    for _ in range(edits):
        at = random.randrange(len(text))
        text[at : at + random.randrange(4)] = words(random, random.randrange(4))
    return text


def times(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    taken = []
    for call in calls:
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return {"p50_ms": round(statistics.median(taken), 3), "p95_ms": round(sorted(taken)[int(0.95 * len(taken))], 3)}


def look_up(random: Random, count: int, exact_up_to: int) -> dict[str, Any]:
    """Fill an index, look up near texts in it (sketch included), drop some."""
    texts = [words(random, TOKENS) for _ in range(count)]
    segments = [Segment(tuple(text)) for text in texts]
    index = NeighbourIndex(exact_up_to)
    start = time.perf_counter()
    for segment in segments:
        index.add(segment)
    add_ms = 1e3 * (time.perf_counter() - start) / count
    picked = random.sample(range(count), 300)
    asked = {edits: [Segment(tuple(edited(random, texts[n], edits))) for n in picked] for edits in (1, 5, 12)}
    found = {
        f"{edits} edits": sum(
            segments[n] in [neighbour.segment for neighbour in index.nearest(query, 3, 0.4)]
            for n, query in zip(picked, queries, strict=True)
        )
        / len(picked)
        for edits, queries in asked.items()
    }
    searched = times([lambda query=query: index.nearest(query, 3, 0.4) for query in asked[5]])  # type: ignore[misc]
    removed = times([lambda n=n: index.remove(segments[n]) for n in picked[:100]])  # type: ignore[misc]
    return {"texts": count, "exact": exact_up_to >= count, "look_up": searched, "found": found} | {
        "add_ms": round(add_ms, 3),
        "remove": removed,
    }


def matching(random: Random, tokens: int, edits: int) -> dict[str, Any]:
    """Match edited texts, with difflib beside it: time, and tokens in common in runs of MIN_RUN or more."""
    pairs = [(edited(random, base, edits), base) for base in (words(random, tokens) for _ in range(9))]

    def difflib(text: list[int], base: list[int]) -> int:
        blocks = SequenceMatcher(None, base, text, autojunk=False).get_matching_blocks()
        return sum(block.size for block in blocks if block.size >= MIN_RUN)

    ours = sum(len(text) - len(match(text, base).absent) for text, base in pairs)
    return {
        "tokens": tokens,
        "edits": edits,
        "match": times([lambda p=p: match(*p) for p in pairs]),  # type: ignore[misc]
        "difflib": times([lambda p=p: difflib(*p) for p in pairs]),  # type: ignore[misc]
        "in_common_of_difflibs": round(ours / sum(difflib(*pair) for pair in pairs), 4),
        "sketch": times([lambda p=p: sketch(p[0]) for p in pairs]),  # type: ignore[misc]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random = Random(given.seed)
    result = {
        "about": {"seed": given.seed, "machine": platform.machine(), "python": platform.python_version()},
        "look_up": [look_up(random, n, EXACT_UP_TO) for n in (1_000, 10_000, 20_000)]
        + [look_up(random, 10_000, exact_up_to=5_000)],
        "match": [
            matching(random, tokens, edits) for tokens, edits in ((200, 4), (1_000, 10), (4_000, 20), (4_000, 100))
        ],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
