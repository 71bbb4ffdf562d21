"""Figures as people read them: a value, its interval and the number of prompts behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eval.pages.quantities import nats, percent, seconds, times

Figure = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """A metric as a column of a table.

    Attributes:
        key: its name in a method's figures.
        show: its value for people.
    """

    key: str
    heading: str
    show: Callable[[float], str]


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _bytes(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"


COLUMNS = (
    Column("speedup", "speed-up", times),
    Column("mean_kl", "mean KL", nats),
    Column("top1", "top-1", percent),
    Column("score", "score", percent),
    Column("judge", "judge consistency", percent),
    Column("reuse", "reuse", percent),
    Column("flops_saved", "prefill FLOPs saved", percent),
    Column("ttft_p50", "TTFT p50", seconds),
    Column("ttft_p95", "TTFT p95", seconds),
    Column("ttft_p99", "TTFT p99", seconds),
    Column("isolate", "isolated bases, not in TTFT", seconds),
    Column("held_bytes", "held", _bytes),
    Column("first_kl", "first KL", nats),
    Column("first_token", "first token", percent),
    Column("identical", "answers identical", percent),
    Column("score_difference", "score, less dense", _signed),
)
"""In the order in which people ask."""
BRIEF = ("speedup", "reuse", "flops_saved", "mean_kl", "top1", "score", "judge")


def interval(entry: Figure, show: Callable[[float], str]) -> str:
    """``low to high, n``; from one prompt there is no interval."""
    n = f"n {entry['n']:.0f}"
    return f"{show(entry['low'])} to {show(entry['high'])}, {n}" if entry["n"] >= 2 else n


def figure(entry: Figure, show: Callable[[float], str]) -> str:
    """``value (low to high; n)``; from one prompt there is no interval."""
    n = f"n {entry['n']:.0f}"
    if entry["n"] < 2:
        return f"{show(entry['value'])} ({n})"
    return f"{show(entry['value'])} ({show(entry['low'])} to {show(entry['high'])}; {n})"


def columns_of(methods: Mapping[str, Mapping[str, Any]], keys: tuple[str, ...] = ()) -> list[Column]:
    """The columns of which any method has a figure, in the usual order."""
    return [c for c in COLUMNS if any(c.key in found for found in methods.values()) and (not keys or c.key in keys)]


def threads_of(result: Mapping[str, Any]) -> str:
    """Threads, and how many cells were measured at once."""
    jobs, threads = result.get("jobs", 1), f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
    return threads if jobs == 1 else f"{jobs} cells at once, each with {threads}"


def facts_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Model, machine, versions and the like as pairs; first what whoever made the file remarked on it."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    remark = [("remark", result["remark"])] if "remark" in result else []
    return [
        *remark,
        ("model", f"{result['model']} (weights {result['model_digest'][:16]}…)"),
        ("machine", f"{result['machine']}; {threads_of(result)}"),
        ("versions", versions),
        ("preset", f"{result['preset']}, seed {result.get('seed', 0)}"),
    ]


def sizes(cell: Mapping[str, Any]) -> str:
    """A cell's sizes in a sentence."""
    trial = cell["trial"]
    prompts, others = (f"{n} prompt{'' if n == 1 else 's'}" for n in (trial["prompts"], trial["fill_prompts"]))
    return (
        f"{cell['agents']} agents, {cell['calls']} calls; {prompts} of about {trial['prompt_tokens']} "
        f"tokens in the last call, learned from {others} of other problems, answers of {trial['answer_tokens']} "
        f"tokens; TTFT taken {trial['repeats']}× a prompt; {cell['seconds']:.0f} s in all. Dense in bfloat16: mean KL "
        f"{nats(cell['yardstick']['mean_kl'])}."
    )
