"""Engines on a real Mooncake cluster: what one computed another reuses, and a node that dies costs no right answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm import Engine, Exact
from kvcomm.store import Priority
from kvcomm.transfer.mooncake import MooncakeStore
from kvcomm.transfer.mooncake_config import MooncakeConfig, Placing
from tests.hf.engines import GREEDY, answer, engine_of, two_agents
from tests.transfer.mooncake_cluster import Cluster, eventually, private_network, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
TEXTS = [f"Count from {n} to {n + 30} and say which of the numbers are odd, which are even, and why." for n in range(4)]


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with private_network():
        yield


def test_generation_stays_right_while_a_node_dies(tmp_path: Path) -> None:
    twice = dict.fromkeys(Priority, Placing(replicas=2))
    config = MooncakeConfig(staging_bytes=16 << 20, placing=twice)
    with Cluster(tmp_path, "--client_ttl=5", nodes=3) as cluster, MooncakeStore(cluster.config(config)) as store:
        first = engine_of(policy=Exact(), store=store)
        writer, _ = two_agents(first)
        prompts = [writer.prompt(task=text) for text in TEXTS]
        expected = [answer(first, prompt, 6) for prompt in prompts]
        for prompt in prompts:
            first.generate(prompt, max_new_tokens=6, **GREEDY)
        first.flush()
        cluster.kill(cluster.nodes[0])

        def all_reused() -> bool:
            """Whether a fresh engine finds everything; its answers are right whatever it finds."""
            engine = Engine(first.model, first.tokenizer, policy=Exact(), store=store)
            replies = [engine.generate(prompt, max_new_tokens=6, **GREEDY) for prompt in prompts]
            assert [reply.token_ids for reply in replies] == expected
            return all(reply.usage.exact >= len(prompt) - 1 for reply, prompt in zip(replies, prompts, strict=True))

        eventually(all_reused, 15)
