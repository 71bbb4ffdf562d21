"""A trading desk of 19 agents with 22 calls a round: 88 calls in four rounds."""

from __future__ import annotations

from eval.topologies.desk import ANALYSTS, ARBITER, BEAR, BULL, CHIEF, HEAD, MANAGER, RISK, SKEPTIC, TRADERS
from eval.topologies.node import Node, Script
from eval.topologies.patterns import check_rounds
from kvcomm.errors import InvalidInput

AGENTS = 19
ROUNDS = 4
DEBATE_PASSES = 2


def trading(agents: int = AGENTS, documents: int = 0, rounds: int = ROUNDS) -> tuple[Node, ...]:
    """Analysts report, researchers debate twice, traders propose, risk judges, a manager decides; then the next round.

    In a further round the analysts hear the decision and what they reported before.

    Raises:
        InvalidInput: another number of agents, or no round.
    """
    if agents != AGENTS:
        raise InvalidInput(f"{agents} agents were asked for; the trading desk has {AGENTS}")
    check_rounds(rounds)
    script = Script(documents)
    decision: list[str] = []
    reported: dict[str, str] = {}
    for _ in range(rounds):
        reported = {
            role.name: script.say(role, [*decision, *([reported[role.name]] if reported else [])]) for role in ANALYSTS
        }
        bull, bear, skeptic = _debate(script, list(reported.values()))
        view = script.say(ARBITER, [bull, bear, skeptic])
        orders = [script.say(role, [reported["technicals"], reported["flows"], view]) for role in TRADERS]
        order = script.say(HEAD, orders)
        judged: list[str] = []
        for role in RISK:
            judged.append(script.say(role, [view, order, *judged]))
        decision = [script.say(MANAGER, [view, order, script.say(CHIEF, judged)])]
    return script.nodes()


def _debate(script: Script, reports: list[str]) -> tuple[str, str, str]:
    """The first pass is over the reports, each hearing who spoke before; the next are over each other's arguments."""
    bull = script.say(BULL, reports)
    bear = script.say(BEAR, [*reports, bull])
    skeptic = script.say(SKEPTIC, [*reports, bull, bear])
    for _ in range(DEBATE_PASSES - 1):
        bull = script.say(BULL, [bear, skeptic])
        bear = script.say(BEAR, [bull, skeptic])
        skeptic = script.say(SKEPTIC, [bull, bear])
    return bull, bear, skeptic
