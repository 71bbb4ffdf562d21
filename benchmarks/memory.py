"""How much memory does a reused call take at its peak? Beside a dense call's, in the same process.

``python -m benchmarks.bench --only memory``
"""

from __future__ import annotations

import gc
from typing import Any

from benchmarks.common import peak_bytes
from benchmarks.team import Team
from benchmarks.ttft import GREEDY
from kvcomm import Balanced, Dense
from kvcomm.reuse.policy import Policy


def measure(team: Team) -> dict[str, Any]:
    """Peak resident bytes of the process during one call of the last agent, the pool of bases in it."""
    case, last = team.measured[0], team.names[-1]
    session = team.engine.fork(policy=Balanced())
    for name in team.names[:-1]:
        session.agents[name].force(case.messages[name], **team.slots(case, name))
    found = {}
    kinds: dict[str, Policy] = {"dense": Dense(), "reused": Balanced()}
    for kind, policy in kinds.items():
        agent = session.fork(policy=policy, learn=False).agents[last]

        def call(agent: Any = agent) -> None:
            agent.generate(max_new_tokens=1, options=GREEDY, **team.slots(case, last))

        call()
        team.engine.backend.memory.drop_idle()
        before = peak_bytes(gc.collect)
        found[kind] = peak_bytes(call)
        found[f"{kind}_above_rest"] = found[kind] - before
    pool = team.engine.pool.nbytes + session.pool.nbytes
    return {
        "dense_peak_bytes": found["dense"],
        "reused_peak_bytes": found["reused"],
        "dense_call_bytes": found["dense_above_rest"],
        "reused_call_bytes": found["reused_above_rest"],
        "pool_bytes": pool,
        "idle_bytes": team.engine.backend.memory.idle_bytes,
        "share_of_limit": found["reused"] / (1.5 * found["dense"] + pool),
    }
