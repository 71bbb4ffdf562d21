"""A call of a workflow: who speaks, what stands in the prompt, and which template it is that the engine knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.topologies.roles import Role
from kvcomm import Slot, System


@dataclass(frozen=True)
class Node:
    """One call of an agent. An agent that is called several times has a node for each call.

    Attributes:
        hears: names of the earlier calls whose answers stand in its prompt, in that order.
        documents: how many document slots its prompt has.
        call: the how-manyth call of this role it is, from 1.
        agent: the name under which the engine knows its template. Calls of one role that hear the same speakers in the
            same order share one, so that what is learned in one is known in the next.
        choices: names of the speakers that it has to choose between; empty for all but judges.
    """

    role: Role
    hears: tuple[str, ...]
    documents: int
    call: int = 1
    agent: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.agent:
            object.__setattr__(self, "agent", self.role.name)

    @property
    def name(self) -> str:
        """The call's name: the role's, and from the second call on its number."""
        return call_name(self.role.name, self.call)

    @property
    def slots(self) -> dict[str, str]:
        """The heard call by the slot that its answer fills: the speaker's name, numbered if it is heard twice."""
        seen: Counter[str] = Counter()
        found = {}
        for heard in self.hears:
            speaker = speaker_of(heard)
            seen[speaker] += 1
            found[speaker if seen[speaker] == 1 else f"{speaker}_{seen[speaker]}"] = heard
        return found

    def template(self) -> list[System | Slot | str]:
        """The agent's prompt: its standing instruction, documents, the task, what it heard, its request."""
        parts: list[System | Slot | str] = [System(self.role.system)]
        for n in range(self.documents):
            parts += [f"{chr(10) if n else ''}Reference {n + 1}:\n", Slot(f"document_{n + 1}")]
        parts += ["\n\nTask:\n", Slot("task")]
        for slot, heard in self.slots.items():
            parts += [f"\n\nThe {speaker_of(heard)} said:\n", Slot(slot)]
        parts.append(f"\n\n{self.role.request}")
        return parts


def call_name(role: str, call: int) -> str:
    """The name of a role's ``call``-th call."""
    return role if call == 1 else f"{role}.{call}"


def speaker_of(name: str) -> str:
    """The role that makes the call of that name."""
    return name.partition(".")[0]


class Script:
    """A workflow written down call by call; ``say`` returns the call's name, ``nodes`` the whole."""

    def __init__(self, documents: int) -> None:
        self._documents = documents
        self._nodes: list[Node] = []
        self._calls: Counter[str] = Counter()

    def say(self, role: Role, hears: Sequence[str] = (), choices: Sequence[str] = ()) -> str:
        """The role's next call, which hears the calls named."""
        self._calls[role.name] += 1
        node = Node(role, tuple(hears), self._documents, self._calls[role.name], choices=tuple(choices))
        self._nodes.append(node)
        return node.name

    def nodes(self) -> tuple[Node, ...]:
        """All calls in order, each with the name of its template."""
        shapes: dict[str, list[tuple[str, ...]]] = {}
        found = []
        for node in self._nodes:
            known = shapes.setdefault(node.role.name, [])
            speakers = tuple(node.slots)
            if speakers not in known:
                known.append(speakers)
            number = known.index(speakers)
            found.append(replace(node, agent=node.role.name if number == 0 else f"{node.role.name}-{number + 1}"))
        return tuple(found)
