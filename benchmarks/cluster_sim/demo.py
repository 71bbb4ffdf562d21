"""The demo of several processes on one service, simulated, and compared with what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.cluster_sim.costs import Costs
from kvcomm.errors import InvalidInput


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


def calibrated(costs: Costs, result: Mapping[str, object]) -> Costs:
    """The costs with computing as fast as the run's own cold calls were; all else stays.

    Without it, the machine's speed on that day would be compared, and not the simulation.
    """
    tokens, cold = _number(result, "tokens"), _number(result, "cold_s")
    factor = (cold - costs.last_token_s) / costs.dense_s(tokens)
    if factor <= 0:
        raise InvalidInput(f"cold_s {cold} is under last_token_s {costs.last_token_s}; measure the costs anew")
    return dataclasses.replace(costs, dense_a_s=costs.dense_a_s * factor, dense_b_s=costs.dense_b_s * factor)


def compare(costs: Costs, result: Mapping[str, object]) -> list[Compared]:
    """The figures of ``results/cluster.json`` beside the simulated ones, local and remote; cold is given.

    Raises:
        InvalidInput: a member is missing or is no positive number.
    """
    tokens, cached = int(_number(result, "tokens")), int(_number(result, "cached_tokens"))
    if cached > tokens:
        raise InvalidInput(f"cached_tokens {cached} exceeds tokens {tokens}; the file is not of one run")
    found = simulate(calibrated(costs, result), tokens, cached, _number(result, "bytes_moved"))
    return [Compared(name, found[name], _number(result, name)) for name in ("local_s", "remote_s")]


def within(compared: list[Compared], limit: float = 0.2) -> bool:
    """Whether all are."""
    return all(one.error <= limit for one in compared)


def _number(result: Mapping[str, object], name: str) -> float:
    value = result.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidInput(f"{name} is {value!r}, not a positive number; give a file of python -m benchmarks.cluster")
    return float(value)
