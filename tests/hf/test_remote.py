"""Two processes, one service: what the first computed the second reuses; without the service it computes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvcomm import Exact, Slot
from kvcomm.transfer.remote import RemoteStore
from tests.hf.engines import GREEDY, answer, engine_of
from tests.serve.process import ServiceProcess

TASK = "Find the two largest numbers of a list in one pass, and say what it costs."


def answered(address: str) -> dict[str, Any]:
    """One greedy call of a fresh engine whose store is the service."""
    store = RemoteStore(address)
    engine = engine_of(store=store, policy=Exact())
    agent = engine.agent("writer", ["You write. Task: ", Slot("task"), "\nWrite:"])
    started = time.perf_counter()
    reply = agent.generate(task=TASK, max_new_tokens=6, options=GREEDY)
    seconds = time.perf_counter() - started
    dense = answer(engine, agent.prompt(task=TASK), 6)
    faults = getattr(engine.pool, "faults", 0)
    try:
        engine.close()
    except Exception as error:
        faults = f"{faults}, {type(error).__name__}"
    store.close()
    return {
        "cached": reply.usage.cached_tokens, "prompt": reply.usage.prompt_tokens, "tokens": list(reply.token_ids),
        "dense": list(dense), "faults": faults, "seconds": seconds,
    }  # fmt: skip


def in_a_fresh_process(address: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.hf.test_remote", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_second_process_reuses_what_the_first_computed(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "kept") as service:
        first, second = in_a_fresh_process(service.address), in_a_fresh_process(service.address)
        service.kill()
        alone = in_a_fresh_process(service.address)
    assert first["cached"] == 0
    assert second["cached"] > 0.8 * second["prompt"]
    assert first["faults"] == second["faults"] == 0
    assert alone["cached"] == 0
    assert alone["faults"]
    assert first["tokens"] == second["tokens"] == alone["tokens"] == first["dense"]


if __name__ == "__main__":
    print(json.dumps(answered(sys.argv[1])))
