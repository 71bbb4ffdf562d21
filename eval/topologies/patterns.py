"""The patterns that multi-agent work is made of, with two to ten agents and any number of rounds.

Full is KVCOMM's (arXiv 2510.12872); map-reduce, debate, reflection and parallel chains are Helium's (2603.16104);
independent is retrieval as CacheBlend (2405.16444) measures it.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval.topologies.node import Node, Script
from eval.topologies.roles import ROLES, Role
from kvcomm.errors import InvalidInput

_JUDGE = Role(
    "judge",
    ROLES[-1].system,
    "Whose proposal is best? Answer with the name of that colleague alone.",
)
_AUTHOR = "solver"
_CRITICS = ("reviewer", "critic", "tester", "simplifier", "analyst", "editor", "historian", "planner", "judge")
_MERGER = Role(
    "merger",
    "You are the merger. Several colleagues worked on the task without hearing each other, or in groups that did not "
    "talk. You compare what they bring, keep what more than one of them found by their own way, settle contradictions "
    "by looking at the task itself, and write one answer that uses the best of each. Say nothing about who wrote what.",
    "Write the one answer.",
)
_READER = Role("reader", "You answer questions about reference material.", "Answer in one sentence.")


def _roles(agents: int) -> tuple[Role, ...]:
    if not 2 <= agents <= len(ROLES):
        raise InvalidInput(f"{agents} agents were asked for; choose 2 to {len(ROLES)}")
    return ROLES[:agents]


def check_rounds(rounds: int) -> None:
    """Raise InvalidInput for less than one round."""
    if rounds < 1:
        raise InvalidInput(f"{rounds} rounds were asked for; ask for at least 1")


def full(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """Fully connected in order: each agent hears all earlier ones, in further rounds what everybody said last."""
    roles, script, said = _start(agents, documents, rounds)
    for _ in range(rounds):
        for role in roles:
            said[role.name] = script.say(role, list(said.values()))
    return script.nodes()


def independent(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """All read the same documents and nobody hears anybody; the last is a plain reader, which answers.

    What retrieval shares: documents behind another instruction. A model too small to work with colleagues can answer
    here, so scores tell methods apart.

    Raises:
        InvalidInput: more than one round, which would be the same calls again.
    """
    roles, script, _ = _start(agents, documents, rounds)
    if rounds > 1:
        raise InvalidInput(f"{rounds} rounds were asked for; nobody hears anybody, so ask for 1")
    for role in (*roles[:-1], _READER):
        script.say(role)
    return script.nodes()


def chain(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """Each agent hears the one before it; the first hears the last one of the round before."""
    roles, script, _ = _start(agents, documents, rounds)
    before: tuple[str, ...] = ()
    for _ in range(rounds):
        for role in roles:
            before = (script.say(role, before),)
    return script.nodes()


def map_reduce(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """All but the last work without hearing each other, the last merges; in a further round all hear its result."""
    roles, script, _ = _start(agents, documents, rounds)
    result: tuple[str, ...] = ()
    for _ in range(rounds):
        result = (script.say(_MERGER, [script.say(role, result) for role in roles[:-1]]),)
    return script.nodes()


def debate(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """All but the last propose; in each further round each hears what all said last; a judge names the best."""
    roles, script, said = _start(agents, documents, rounds)
    debaters = roles[:-1]
    for _ in range(rounds):
        heard = list(said.values())
        said = {role.name: script.say(role, heard) for role in debaters}
    script.say(_JUDGE, list(said.values()), choices=[role.name for role in debaters])
    return script.nodes()


def reflection(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """One drafts, the others criticise it, it writes again having heard them and its own draft; once a round."""
    roles, script, _ = _start(agents, documents, rounds)
    known = {role.name: role for role in ROLES}
    writer, critics = known[_AUTHOR], [known[name] for name in _CRITICS[: len(roles) - 1]]
    draft = script.say(writer)
    for _ in range(rounds):
        draft = script.say(writer, [draft, *_each(script, critics, [draft])])
    return script.nodes()


def parallel_chains(agents: int, documents: int, rounds: int = 1) -> tuple[Node, ...]:
    """All but the last stand in two chains that do not hear each other; the last merges their ends."""
    roles, script, _ = _start(agents, documents, rounds)
    workers = roles[:-1]
    chains = [part for part in (workers[::2], workers[1::2]) if part]
    result: tuple[str, ...] = ()
    for _ in range(rounds):
        ends = []
        for part in chains:
            before = result
            for role in part:
                before = (script.say(role, before),)
            ends.append(before[0])
        result = (script.say(_MERGER, ends),)
    return script.nodes()


def _start(agents: int, documents: int, rounds: int) -> tuple[tuple[Role, ...], Script, dict[str, str]]:
    check_rounds(rounds)
    return _roles(agents), Script(documents), {}


def _each(script: Script, roles: Sequence[Role], heard: Sequence[str]) -> list[str]:
    return [script.say(role, heard) for role in roles]
