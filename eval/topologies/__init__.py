"""Who hears whom: a workflow is a list of calls in order of execution, each with the earlier ones it hears.

A new topology is a function of (agents, documents, rounds) and one line here.
"""

from __future__ import annotations

from typing import Protocol

from eval.topologies.node import Node
from eval.topologies.patterns import chain, debate, full, independent, map_reduce, parallel_chains, reflection
from eval.topologies.trading import trading

__all__ = ["TOPOLOGIES", "Node", "Topology", "full"]


class Topology(Protocol):
    """Makes a workflow."""

    def __call__(self, agents: int, documents: int, rounds: int = ...) -> tuple[Node, ...]:
        """The calls in order.

        Args:
            agents: how many different agents.
            documents: document slots in each prompt.
            rounds: how often the pattern is gone through.

        Raises:
            InvalidInput: agents or rounds that the topology does not have.
        """
        ...


TOPOLOGIES: dict[str, Topology] = {
    "full": full,
    "independent": independent,
    "chain": chain,
    "map-reduce": map_reduce,
    "debate": debate,
    "reflection": reflection,
    "parallel-chains": parallel_chains,
    "trading": trading,
}
