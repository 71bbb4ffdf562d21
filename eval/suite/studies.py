"""The studies whose results lie beside a preset's, as sections of the document: peers, changing tools, the tail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.files.reading import read_file, strict_json
from eval.pages.markdown_text import code
from eval.pages.quantities import percent, seconds, times
from eval.peers import command as peers
from eval.studies import tail, tools_story
from eval.suite.plots import Dot, intervals
from eval.suite.words import threads_of
from kvcomm.errors import InvalidInput

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A study's results as they are shown.

    Attributes:
        name: its command, and the stem of its results file.
        heading: of its section.
        about: what its figures are.
        repeat: its command, and where it was given.
        table: the same in Markdown.
        plots: drawings to stand beside each other.
    """

    name: str
    heading: str
    about: str
    repeat: str
    table: str
    plots: tuple[str, ...]


@dataclass(frozen=True)
class _Study:
    name: str
    heading: str
    about: str
    table: Callable[[Result], str]
    plots: Callable[[Result], tuple[str, ...]]


def found_beside(folder: Path) -> Iterator[Found]:
    """Every study that has a results file in ``folder``.

    Raises:
        InvalidInput: a file is there and cannot be shown.
    """
    for study in STUDIES:
        path = folder / f"{study.name}.json"
        if not path.exists():
            continue
        try:
            result = strict_json(read_file(path, f"a results file of `eval {study.name}`"))
            repeat = f"{code(result['command'])}, {result['machine']}, {threads_of(result)}."
            yield Found(study.name, study.heading, study.about, repeat, study.table(result), study.plots(result))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"{path} cannot be shown ({type(error).__name__}: {error}); "
                f"measure again: python -m eval {study.name} --out {path}"
            ) from None


def _dot(label: str, entry: Mapping[str, float], show: Callable[[float], str], css: str) -> Dot:
    return Dot(label, entry["value"], entry["low"], entry["high"], show(entry["value"]), css)


def _peers_plots(result: Result) -> tuple[str, ...]:
    def speed(title: str, key: str) -> str:
        rows = [
            _dot(name, found[key], _precise, "reused" if name == "kvcomm" else "new")
            for name, found in result["peers"].items()
        ]
        return intervals(title, rows, log=True, mark=("its own dense run", 1.0))

    return (
        speed("Dense TTFT over TTFT, behind another agent", "ratio"),
        speed("Dense TTFT over TTFT, the same prompt again", "again_ratio"),
    )


def _precise(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else times(ratio)


def _tools_plots(result: Result) -> tuple[str, ...]:
    rows = [entry for entry in result["table"] if entry["form"] == "as given"]
    hits = [
        _dot(f"{entry['change']}: {who}", entry[key], percent, css)
        for entry in rows
        for who, key, css in (("prefix reuse", "hit_exact", "exact"), ("kvcomm", "hit_kvcomm", "reused"))
    ]
    sooner = [
        _dot(entry["change"], entry["prefix_over_kvcomm"], _precise, "reused")
        for entry in rows
        if "prefix_over_kvcomm" in entry
    ]
    drawn = [intervals("Hit rate, tools as given", hits)]
    if sooner:
        drawn.append(
            intervals("TTFT of prefix reuse over kvcomm's, tools as given", sooner, mark=("prefix reuse", 1.0))
        )
    return tuple(drawn)


def _tail_plots(result: Result) -> tuple[str, ...]:
    colours = {"dense": "dense", "exact": "exact"}
    rows = [
        _dot(f"{name}, p{q}", found[f"ttft_p{q}"], seconds, colours.get(name, "reused"))
        for q in (50, 95, 99)
        for name, found in result["methods"].items()
    ]
    return (intervals("TTFT of all calls, seconds, two conversations at once", rows),)


STUDIES = (
    _Study(
        "peers", "Other programs",
        "Each against its own dense run: dense TTFT over TTFT with reuse, where the text was read by another agent, "
        "and where the very same prompt is asked again. `answer kept` is the share of its own dense answer. Prefix "
        "caches find nothing of the first and all of the second, where they are far ahead of `Balanced()`: it keeps "
        "one base of each text and recomputes 8 tokens of it (`Exact()` and chats keep whole prompts). Times of two "
        "programs cannot be compared: llama.cpp computes with 4-bit weights ([evaluation.md]"
        "(evaluation.md#other-programs)).",
        peers.table, _peers_plots,
    ),
    _Study(
        "tools-story", "Tools that come and go",
        "Twelve tools in the system turn, changed after a first answer. The hit rate is the share of the prompt that "
        "was not computed ([evaluation.md](evaluation.md#tools-that-come-and-go)).",
        tools_story.table, _tools_plots,
    ),
    _Study(
        "tail", "The tail",
        "Two conversations of several turns at a time over one engine; intervals resample conversations "
        "([evaluation.md](evaluation.md#the-tail)).",
        tail.table, _tail_plots,
    ),
)  # fmt: skip
