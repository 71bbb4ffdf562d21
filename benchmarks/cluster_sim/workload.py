"""Sessions as published traces have them: how many turns, calls and tokens, how bursty, how long between calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Shape of the load. The source of each default is in ``SOURCES``.

    Attributes:
        sessions_s: sessions that begin, per node and second.
        namespaces: tenants; sessions go to them by Zipf's law with exponent ``zipf``.
        shared_texts, shared_tokens: texts that all sessions of a namespace begin with, and tokens of each.
        turns, calls: mean turns of a session and calls of a turn, both geometric.
        appended: median tokens that a call adds (a tool's result, a message); ``appended_sigma`` of its logarithm.
        output: mean tokens of an answer.
        tool_s, human_s: median pause before a call and before a turn; ``pause_sigma`` of their logarithms.
        burst: shape of the gamma distribution of gaps between sessions; 1 is Poisson, less is burstier.
        agents: agents of a session; each has a template of its own, so no prefix is shared between them.
        sticky: how often a call goes to the node of the session's last call.
        context: tokens at which a session ends.
    """

    sessions_s: float = 0.006
    namespaces: int = 64
    zipf: float = 1.0
    shared_texts: int = 3
    shared_tokens: int = 512
    turns: float = 3.95
    calls: float = 7.83
    appended: float = 150.0
    appended_sigma: float = 1.0
    output: float = 53.0
    tool_s: float = 2.0
    human_s: float = 30.0
    pause_sigma: float = 1.2
    burst: float = 0.5
    agents: int = 3
    sticky: float = 0.5
    context: int = 7590


COPILOT = "Azure GitHub Copilot Coding Agent Traces 2026 (arXiv:2608.00101): 301K sessions, 1.2M turns, 9.3M calls"
SOURCES = {
    "turns": f"{COPILOT}; 3.95 turns a session",
    "calls": f"{COPILOT}; 7.83 model calls a turn",
    "output": f"{COPILOT}; 4.91B tokens in 9.3M calls are 528 a call, here a tenth, as contexts are here",
    "context": "Mooncake's trace (arXiv:2407.00079, section 4.2): 7,590 input tokens on average, here the most. "
    f"{COPILOT}; 631.4B prompt tokens are 68K a call, more than the measured model has positions",
    "appended": "assumption, so that contexts grow as long in a session as context allows",
    "burst": "BurstGPT (arXiv:2401.17644) gaps are gamma, far burstier than Poisson; 0.5 is an assumption",
    "tool_s": "Continuum (arXiv:2511.02230): tools take ms to tens of s; median and spread are assumptions",
    "human_s": "TraceLab (arXiv:2606.30560): human-paced gaps between turns; the median is an assumption",
    "zipf": "assumption: Zipf's law among tenants",
    "shared_texts": "assumption: system text, tool definitions, task",
    "agents": "assumption, as the five-agent demo with fewer",
    "sticky": "assumption: a router that finds the last node half of the time; 1 is session affinity",
    "sessions_s": "assumption: a node is busy a third of the time with reuse",
    "namespaces": "assumption",
}


@dataclass(slots=True)
class Session:
    """One session. ``calls[i]`` is (pause before it in s, tokens appended, tokens of the answer)."""

    number: int
    namespace: int
    begins_s: float
    calls: list[tuple[float, int, int]]


def sessions(shape: Shape, nodes: int, seconds: float, random: np.random.Generator) -> Iterator[Session]:
    """The sessions that begin within ``seconds``, in order."""
    weights = 1.0 / np.arange(1, shape.namespaces + 1) ** shape.zipf
    weights /= weights.sum()
    gap = 1.0 / (shape.sessions_s * nodes)
    now, number = 0.0, 0
    while True:
        now += float(random.gamma(shape.burst, gap / shape.burst))
        if now >= seconds:
            return
        namespace = int(random.choice(shape.namespaces, p=weights))
        yield Session(number, namespace, now, _calls(shape, random))
        number += 1


def _calls(shape: Shape, random: np.random.Generator) -> list[tuple[float, int, int]]:
    turns = random.geometric(1.0 / shape.turns)
    counts = random.geometric(1.0 / shape.calls, turns)
    total = int(counts.sum())
    pauses = shape.tool_s * random.lognormal(0.0, shape.pause_sigma, total)
    pauses[np.cumsum(counts)[:-1]] *= shape.human_s / shape.tool_s
    pauses[0] = 0.0
    appended = np.maximum(8, shape.appended * random.lognormal(0.0, shape.appended_sigma, total)).astype(int)
    answers = random.geometric(1.0 / shape.output, total)
    room = shape.context - shape.shared_texts * shape.shared_tokens
    fits = max(1, int(np.searchsorted(np.cumsum(appended + answers), room)))
    return list(zip(pauses[:fits].tolist(), appended[:fits].tolist(), answers[:fits].tolist(), strict=True))
