"""How soon is the first token out, agent by agent, and how close is what follows? Beside dense, exact and the floor.

``python -m benchmarks.bench --only ttft``. Dense, exact, balanced and fast take turns on the first measured case. The
cases that closeness is a mean over share no text with those that offsets were learned from, and nothing is learned
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.common import cost, rounds, timed
from benchmarks.team import Case, Team
from eval.methods.registry import METHODS
from kvcomm import Balanced, Dense, Engine, Exact, Fast, Segment
from kvcomm.closeness import kl_divergence
from kvcomm.errors import KVCommError
from kvcomm.reuse.policy import Policy

GREEDY = {"do_sample": False}
POLICIES: dict[str, Policy] = {"dense": Dense(), "exact": Exact(), "balanced": Balanced(), "fast": Fast()}
CLOSE: dict[str, Policy] = {
    "balanced": POLICIES["balanced"],
    "fast": POLICIES["fast"],
    "rerotate": METHODS["rerotate"].policy,
}
Row = dict[str, Any]


def measure(team: Team) -> dict[str, Any]:
    """Rows by agent, what stands behind them, and their floor."""
    before = team.engine.version
    rows: list[Row] = [{"agent": number + 1} for number in range(len(team.names))]
    details: list[Row] = [{"agent": number + 1, "name": name} for number, name in enumerate(team.names)]
    closeness: list[list[Row]] = []
    for number, case in enumerate(team.measured):
        sessions = {name: team.engine.fork(policy=policy) for name, policy in (POLICIES | CLOSE).items()}
        close = []
        for index, name in enumerate(team.names):
            if number == 0:
                timing = _times(team, sessions, case, name)
                rows[index] |= {f"{policy}_s": median(timing["ttft_s"][policy]) for policy in POLICIES}
                details[index] |= timing
            close.append(_closeness(team, sessions, case, name))
            for kept in CLOSE:  # the task and the message become bases, as they would where they are first computed
                sessions[kept].agents[name].force(case.messages[name], **team.slots(case, name))
        closeness.append(close)
    if team.engine.version != before:
        raise KVCommError("the pool changed while it was measured; the figures are void")
    for index, row in enumerate(rows):
        row |= {column: fmean(case[index][column] for case in closeness) for column in closeness[0][index]}
    return {"ttft": rows, "ttft_details": details, "floor": _floor(team, details)}


def _times(team: Team, sessions: dict[str, Engine], case: Case, name: str) -> Row:
    slots = team.slots(case, name)
    calls: dict[str, Callable[[], float]] = {}
    replies = {}
    for policy in POLICIES:
        agent = sessions[policy].fork(policy=POLICIES[policy], learn=False).agents[name]

        def call(agent: Any = agent, policy: str = policy) -> float:
            replies[policy] = agent.generate(max_new_tokens=1, options=GREEDY, **slots)
            return float(replies[policy].ttft_s)

        calls[policy] = call
    warm = {policy: calls[policy] for policy in ("balanced", "fast")}
    rounds(warm, 1)
    costs = {policy: vars(cost(call)) for policy, call in warm.items()}
    times = rounds(calls, team.size.repeats)
    return {
        "prompt_tokens": replies["fast"].usage.prompt_tokens,
        "computed_tokens": {policy: _computed(reply) for policy, reply in replies.items()},
        "cost": costs,
        "ttft_s": times,
    }


def _computed(reply: Any) -> int:
    return int(reply.usage.prompt_tokens - reply.usage.cached_tokens)


def _closeness(team: Team, sessions: dict[str, Engine], case: Case, name: str) -> Row:
    """Teacher-forced on the dense run's greedy tokens: mean KL in nats and top-1 agreement."""
    slots = team.slots(case, name)
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    dense = sessions["dense"].fork(policy=Dense(), learn=False).agents[name]
    reply = dense.generate(max_new_tokens=team.size.answer, options=options, **slots)
    wanted = torch.cat(reply.output.logits).float()
    isolating = sessions["rerotate"]
    isolating.isolate([part.segment for part in isolating.agents[name].prompt(**slots).parts[1:]])
    row: Row = {}
    for kind, policy in CLOSE.items():
        session = sessions[kind].fork(policy=policy, learn=False)
        logits, _ = session.agents[name].force(Segment(reply.token_ids), **slots)
        before = "" if kind == "balanced" else f"{kind}_"
        row[f"{before}mean_kl"] = float(kl_divergence(wanted, logits).mean().clamp_min(0))
        row[f"{before}top1"] = float((wanted.argmax(-1) == logits.argmax(-1)).double().mean())
    return row


def _floor(team: Team, details: list[Row]) -> dict[str, Any]:
    """Dense seconds per token times the tokens that are computed, and one pass over the bytes of the prompt's KV.

    A pass over a single token takes longer than a token of a prefill, since all weights are read for it: one_token_s,
    the least that any call can take whose generating is left to the model.
    """
    spec = team.engine.backend.spec
    nbytes = spec.fingerprint.bytes_per_token * details[-1]["prompt_tokens"]
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    buffer = team.engine.backend.buffer(details[-1]["prompt_tokens"])
    buffer.clear(0, buffer.capacity)
    buffer.length = buffer.capacity
    last = buffer.capacity - 1
    calls = {
        "memcpy": lambda: timed(lambda: target.copy_(source)),
        "one_token": lambda: timed(lambda: team.engine.backend.forward(buffer, [1], [last], logits=1)),
    }
    rounds(calls, 1)
    times = {name: median(found) for name, found in rounds(calls, 3 * team.size.repeats).items()}
    rate = nbytes / times["memcpy"]
    by_agent = []
    for detail in details:
        tokens = detail["prompt_tokens"]
        each = median(detail["ttft_s"]["dense"]) / tokens
        moved = spec.fingerprint.bytes_per_token * tokens / rate
        floors = {f"{p}_s": each * detail["computed_tokens"][p] + moved for p in ("balanced", "fast")}
        by_agent.append({"agent": detail["agent"], "dense_s_per_token": each, **floors})
    return {"memcpy_gb_per_s": rate / 1e9, "one_token_s": times["one_token"], "by_agent": by_agent}
