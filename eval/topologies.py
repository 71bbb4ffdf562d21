"""Who hears whom: a workflow is a list of agents in order of execution, each with the earlier ones it hears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eval.roles import ROLES, Role
from kvcomm import Slot, System
from kvcomm.errors import InvalidInput


@dataclass(frozen=True)
class Node:
    """One agent of a workflow.

    Attributes:
        hears: names of the agents whose answers stand in its prompt, in that order.
        documents: how many document slots its prompt has.
    """

    role: Role
    hears: tuple[str, ...]
    documents: int

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.role.name

    def template(self) -> list[System | Slot | str]:
        """The agent's prompt: its standing instruction, documents, the task, what it heard, its request."""
        parts: list[System | Slot | str] = [System(self.role.system)]
        for n in range(self.documents):
            parts += [f"{chr(10) if n else ''}Reference {n + 1}:\n", Slot(f"document_{n + 1}")]
        parts += ["\n\nTask:\n", Slot("task")]
        for name in self.hears:
            parts += [f"\n\nThe {name} said:\n", Slot(name)]
        parts.append(f"\n\n{self.role.request}")
        return parts


def _roles(agents: int) -> tuple[Role, ...]:
    if not 2 <= agents <= len(ROLES):
        raise InvalidInput(f"{agents} agents were asked for; choose 2 to {len(ROLES)}")
    return ROLES[:agents]


def full(agents: int, documents: int) -> tuple[Node, ...]:
    """Fully connected in order: each agent hears all earlier ones (the setting of KVCOMM, arXiv 2510.12872)."""
    roles = _roles(agents)
    return tuple(Node(role, tuple(r.name for r in roles[:n]), documents) for n, role in enumerate(roles))


def chain(agents: int, documents: int) -> tuple[Node, ...]:
    """Each agent hears the one before it."""
    roles = _roles(agents)
    return tuple(Node(role, tuple(r.name for r in roles[max(n - 1, 0) : n]), documents) for n, role in enumerate(roles))


TOPOLOGIES: dict[str, Callable[[int, int], tuple[Node, ...]]] = {"full": full, "chain": chain}
