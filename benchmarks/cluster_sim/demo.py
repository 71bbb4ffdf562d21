"""The demo of three processes, simulated from unit costs that runs of other lengths gave, beside what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.cluster_sim.costs import Costs
from kvcomm.errors import InvalidInput

MARK = "<!-- demo -->"
_NO_LIMIT_BYTES_S = 1e15  # the demo's processes have no network between them


@dataclass(frozen=True)
class Compared:
    """One figure, simulated and measured, in seconds."""

    name: str
    simulated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to the measured one."""
        return abs(self.simulated_s - self.measured_s) / self.measured_s


def simulate(costs: Costs, tokens: int, cached: int, nbytes: float) -> dict[str, float]:
    """TTFT in s of a prompt computed in full, reused from this process, and by another one through the service."""
    again = cached * costs.recompute_share
    new = tokens - cached
    local = costs.last_token_s + cached * costs.splice_s + costs.dense_s(again + new, cached - again)
    fetch = costs.service_call_s + costs.network_rtt_s + nbytes / min(costs.service_bytes_s, costs.network_bytes_s)
    return {"cold_s": costs.last_token_s + costs.dense_s(tokens), "local_s": local, "remote_s": local + fetch}


def measured(costs: Costs, runs: Sequence[Mapping[str, object]]) -> Costs:
    """Unit costs of this machine from two or more runs of the demo, of other lengths than the one to be predicted.

    Least squares of the relative errors. The demo reuses exactly, so nothing is recomputed, and it has no network.

    Raises:
        InvalidInput: fewer than two lengths, a member that is missing or no positive number, or times that no costs
            of at least 0 explain.
    """
    if len({_number(run, "tokens") for run in runs}) < 2:
        raise InvalidInput("costs need runs of two lengths or more; run benchmarks.cluster with two --tokens")
    rows: list[list[float]] = []
    seconds: list[float] = []
    moving: list[list[float]] = []
    moved_s: list[float] = []
    for run in runs:
        tokens, cached = _tokens(run)
        new, local = tokens - cached, _number(run, "local_s")
        rows += [[tokens, tokens * tokens / 2, 0, 1], [new, cached * new + new * new / 2, cached, 1]]
        seconds += [_number(run, "cold_s"), local]
        moving.append([1, _number(run, "bytes_moved")])
        moved_s.append(_number(run, "remote_s") - local)
    a, b, splice, last = _costs(rows, seconds)
    call, per_byte = _costs(moving, moved_s)
    return dataclasses.replace(
        costs, dense_a_s=a, dense_b_s=b, splice_s=splice, last_token_s=last, recompute_share=0.0, service_call_s=call,
        service_bytes_s=min(_NO_LIMIT_BYTES_S, 1 / per_byte) if per_byte else _NO_LIMIT_BYTES_S, network_rtt_s=0.0,
        network_bytes_s=_NO_LIMIT_BYTES_S,
    )  # fmt: skip


def compare(costs: Costs, runs: Sequence[Mapping[str, object]], result: Mapping[str, object]) -> list[Compared]:
    """What ``runs`` say that ``result`` had to be, beside what it was: cold, local, remote. Raises InvalidInput."""
    tokens, cached = _tokens(result)
    if any(_number(run, "tokens") == tokens for run in runs):
        raise InvalidInput(f"a run of {tokens} tokens is to be predicted from itself; take runs of other lengths")
    found = simulate(measured(costs, runs), tokens, cached, _number(result, "bytes_moved"))
    return [Compared(name, found[name], _number(result, name)) for name in ("cold_s", "local_s", "remote_s")]


def within(compared: Sequence[Compared], limit: float = 0.2) -> bool:
    """Whether all are."""
    return all(one.error <= limit for one in compared)


def table(compared: Sequence[Compared], tokens: int) -> str:
    """The comparison in Markdown."""
    rows = "".join(
        f"| {c.name[:-2]} | {c.simulated_s:.3f} s | {c.measured_s:.3f} s | {c.error:.0%} |\n" for c in compared
    )
    return f"{tokens:,} tokens:\n\n| TTFT | simulated | measured | off by |\n|---|---|---|---|\n{rows}"


def into(page: str, text: str) -> str:
    """A page with ``text`` between its two marks. Raises InvalidInput if it has not two."""
    pieces = page.split(MARK)
    if len(pieces) != 3:
        raise InvalidInput(f"the page has {len(pieces) - 1} marks {MARK}, not 2; put them around the table")
    return f"{pieces[0]}{MARK}\n{text}{MARK}{pieces[2]}"


def _costs(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """Least squares with no cost under 0: the best of those over some of the columns, the others 0."""
    target = np.array(seconds)
    if not (target > 0).all():
        raise InvalidInput("a remote TTFT is under the local one; run the demo again while nothing else runs")
    scaled = np.array(rows) / target[:, None]
    columns = scaled.shape[1]
    best, least = np.zeros(columns), float(columns + len(rows))
    for some in (list(s) for size in range(1, columns + 1) for s in combinations(range(columns), size)):
        unit = np.abs(scaled[:, some]).max(axis=0)
        found = np.linalg.lstsq(scaled[:, some] / unit, np.ones(len(rows)), rcond=None)[0] / unit
        off = float(((scaled[:, some] @ found - 1) ** 2).sum())
        if (found >= 0).all() and off < least - 1e-12:
            best, least = np.zeros(columns), off
            best[some] = found
    return [float(value) for value in best]


def _tokens(run: Mapping[str, object]) -> tuple[int, int]:
    tokens, cached = int(_number(run, "tokens")), int(_number(run, "cached_tokens"))
    if cached > tokens:
        raise InvalidInput(f"cached_tokens {cached} exceeds tokens {tokens}; the file is not of one run")
    return tokens, cached


def _number(result: Mapping[str, object], name: str) -> float:
    value = result.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidInput(f"{name} is {value!r}, not a positive number; give a file of python -m benchmarks.cluster")
    return float(value)
