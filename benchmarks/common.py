"""What the benchmarks share: sizes, rounds in which calls take turns, counters of the process, real text."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eval.tasks.prose import topics
from kvcomm import Segment
from kvcomm.errors import InvalidInput


@dataclass(frozen=True)
class Size:
    """How large everything is, in tokens; the defaults are the published shape.

    Attributes:
        repeats: how often each time is taken; figures are medians.
        prefix, task, message: of the team's prompts; ``agents`` of them, fully connected.
        answer: tokens over which closeness is taken.
        learned, close: cases that offsets are learned from, and cases that closeness is a mean over.
        segment, segments: of the texts that are spliced and recomputed in.
        recomputed: tokens that are computed behind or among them.
        processes: fresh processes for the first call.
    """

    repeats: int = 7
    agents: int = 5
    prefix: int = 512
    task: int = 1024
    message: int = 512
    answer: int = 64
    learned: int = 4
    close: int = 4
    segment: int = 512
    segments: int = 6
    recomputed: int = 128
    processes: int = 3

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1 or not 2 <= self.agents <= 5 or self.segments % 2:
            raise InvalidInput(f"{self}: give numbers of at least 1, 2 to 5 agents and an even number of segments")


SMALL = Size(
    repeats=1, agents=3, prefix=64, task=48, message=32, answer=3, learned=2, close=1, segment=48, segments=2,
    recomputed=16, processes=1,
)  # fmt: skip
"""For a look at whether everything runs; the figures mean nothing."""


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def rounds(calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each call returns, ``repeats`` times; they take turns, and another one begins each round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(repeats):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(calls[name]())
    return found


@dataclass(frozen=True)
class Cost:
    """What a call cost the process: seconds of CPU time in user and system mode, page faults without reading a disk."""

    user_s: float
    system_s: float
    page_faults: int


def cost(call: Callable[[], object]) -> Cost:
    """What one call costs."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Cost(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most resident memory that the process had during a call, from Linux's own counter."""
    Path("/proc/self/clear_refs").write_text("5")
    call()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) << 10


class RealText:
    """Python's own language reference (``pydoc_data.topics``), topics in an order of their own; none comes twice."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        held = list(topics().values())
        text = "\n\n".join("\n".join(paragraphs) for paragraphs in random.Random(seed).sample(held, len(held)))
        self._tokenizer = tokenizer
        self._ids: list[int] = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        self._at = 0

    def segment(self, tokens: int) -> Segment:
        """The next ``tokens`` tokens.

        Raises:
            InvalidInput: so many are not left.
        """
        left = len(self._ids) - self._at
        if tokens > left:
            raise InvalidInput(f"{tokens} tokens of text were asked for, {left} are left; ask for fewer cases")
        self._at += tokens
        return Segment(tuple(self._ids[self._at - tokens : self._at]))

    def text(self, tokens: int) -> str:
        """The next ``tokens`` tokens as text; tokenised again it may have one or two more or fewer."""
        return str(self._tokenizer.decode(list(self.segment(tokens).token_ids)))
