"""Workflows: who hears whom is what the pattern says, calls come after what they hear, templates are shared."""

from __future__ import annotations

import pytest

from eval.topologies import TOPOLOGIES, Node
from eval.topologies.node import speaker_of
from kvcomm import Slot
from kvcomm.errors import InvalidInput
from kvcomm.hf.template import check_name

PATTERNS = sorted(set(TOPOLOGIES) - {"trading", "independent"})


def heard(nodes: tuple[Node, ...]) -> dict[str, tuple[str, ...]]:
    return {node.name: node.hears for node in nodes}


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("agents", [2, 3, 10])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_hold_together(name: str, agents: int, rounds: int) -> None:
    check(TOPOLOGIES[name](agents, 2, rounds=rounds))
    assert len({node.role.name for node in TOPOLOGIES[name](agents, 2, rounds=rounds)}) == agents


def check(nodes: tuple[Node, ...]) -> None:
    assert len({node.name for node in nodes}) == len(nodes)
    assert nodes[0].hears == ()
    templates: dict[str, list[object]] = {}
    for place, node in enumerate(nodes):
        before = {earlier.name for earlier in nodes[:place]}
        assert set(node.hears) <= before, node.name
        check_name(node.agent)
        template = node.template()
        assert templates.setdefault(node.agent, template) == template
        named = [part.name for part in template if isinstance(part, Slot)]
        assert len(set(named)) == len(named) == 2 + 1 + len(node.hears)
    left = {node.name for node in nodes} - {name for node in nodes for name in node.hears}
    assert nodes[-1].name in left


def test_full_by_hand() -> None:
    assert heard(TOPOLOGIES["full"](3, 0)) == {
        "planner": (),
        "analyst": ("planner",),
        "solver": ("planner", "analyst"),
    }
    second = heard(TOPOLOGIES["full"](3, 0, rounds=2))
    assert second["planner.2"] == ("planner", "analyst", "solver")
    assert second["solver.2"] == ("planner.2", "analyst.2", "solver")


def test_independent_agents_hear_nobody_and_the_last_is_a_plain_reader() -> None:
    nodes = TOPOLOGIES["independent"](3, 2)
    check(nodes)
    assert heard(nodes) == {"planner": (), "analyst": (), "reader": ()}
    with pytest.raises(InvalidInput, match="2 rounds"):
        TOPOLOGIES["independent"](3, 2, rounds=2)


def test_chain_by_hand() -> None:
    assert heard(TOPOLOGIES["chain"](2, 0, rounds=2)) == {
        "planner": (),
        "analyst": ("planner",),
        "planner.2": ("analyst",),
        "analyst.2": ("planner.2",),
    }


def test_map_reduce_by_hand() -> None:
    nodes = heard(TOPOLOGIES["map-reduce"](3, 0, rounds=2))
    assert nodes["planner"] == nodes["analyst"] == ()
    assert nodes["merger"] == ("planner", "analyst")
    assert nodes["planner.2"] == nodes["analyst.2"] == ("merger",)


def test_debate_ends_with_a_judge_that_chooses_among_the_last_proposals() -> None:
    *debaters, judge = TOPOLOGIES["debate"](3, 0, rounds=2)
    assert [node.hears for node in debaters] == [(), (), ("planner", "analyst"), ("planner", "analyst")]
    assert judge.hears == ("planner.2", "analyst.2") and judge.choices == ("planner", "analyst")


def test_reflection_by_hand() -> None:
    assert heard(TOPOLOGIES["reflection"](3, 0)) == {
        "solver": (),
        "reviewer": ("solver",),
        "critic": ("solver",),
        "solver.2": ("solver", "reviewer", "critic"),
    }


def test_parallel_chains_do_not_hear_each_other() -> None:
    nodes = TOPOLOGIES["parallel-chains"](5, 0)
    assert heard(nodes)["merger"] == ("solver", "reviewer")
    assert heard(nodes)["solver"] == ("planner",) and heard(nodes)["reviewer"] == ("analyst",)


def test_the_trading_desk_has_19_agents_and_88_calls() -> None:
    nodes = TOPOLOGIES["trading"](19, 2)
    check(nodes)
    assert len(nodes) == 88
    assert len({node.role.name for node in nodes}) == 19
    last_round = [node for node in nodes if node.role.name == "manager"][-1]
    assert last_round.name == "manager.4" and [speaker_of(name) for name in last_round.hears] == [
        "arbiter",
        "head",
        "chief",
    ]


def test_rounds_share_templates() -> None:
    nodes = TOPOLOGIES["trading"](19, 2)
    assert len({node.agent for node in nodes}) == 28  # six analysts and the three who debate have two each


@pytest.mark.parametrize(("name", "agents", "rounds"), [("full", 1, 1), ("chain", 11, 1), ("debate", 3, 0)])
def test_impossible_workflows_are_named(name: str, agents: int, rounds: int) -> None:
    with pytest.raises(InvalidInput, match=str(agents) if rounds else "0 rounds"):
        TOPOLOGIES[name](agents, 0, rounds=rounds)


def test_the_desk_has_no_other_size() -> None:
    with pytest.raises(InvalidInput, match="19"):
        TOPOLOGIES["trading"](5, 0)
