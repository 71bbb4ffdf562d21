"""Two engine processes and a service process, on the real model: what one learned and computed serves the other.

Which of them does what, and that one waited for the other, is read from counters of the service and of the calls.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.models.default import load
from kvcomm import Engine, Exact, Fast, Slot
from kvcomm.anchors.pool import Claim
from kvcomm.closeness import kl_divergence
from kvcomm.store.coordinator import Terms
from kvcomm.transfer.remote import RemoteStore
from tests.hf.engines import GREEDY
from tests.serve.process import ServiceProcess

PARTS = ["You write code. Task: ", Slot("task"), "\nPlan: ", Slot("plan"), "\nWrite:"]
PLAN = (
    "Walk once through the list, keep the largest numbers seen so far in a small heap, replace the smallest of them "
    "whenever a larger one comes, and say at the end what all of this costs in time and in memory."
)
TASKS = [f"Find the {n} largest numbers of a list in one pass." for n in ("two", "three", "four", "five")]
MISSED = "Explain how a hash table grows, what that costs, and when it is better to use a balanced tree instead. " * 4
"""Longer than the plan: a call claims its longest text."""


class Node:
    """An engine process that does what it is told, a line of JSON in and one out for each thing."""

    def __init__(self, address: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.hf.test_processes", address, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: str) -> Self:
        """Send a command; ``hear`` its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self

    def hear(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine's process ended"
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=30)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Node, Node, str]]:
    """Two nodes whose models are loaded, and the service's metrics."""
    with ExitStack() as stack:
        service = stack.enter_context(ServiceProcess(folder / "kept", "--status-port", "0"))
        assert service.process.stdout is not None
        page = service.process.stdout.readline().split()[-1]
        nodes = [Node(service.address, name) for name in "ab"]
        for node in nodes:
            stack.callback(node.close)
        yield nodes[0], nodes[1], page + "metrics"


def claims_answered(metrics: str) -> int:
    """How many times the service answered the call ``claim``."""
    with urllib.request.urlopen(metrics, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith('kvcomm_request_seconds_count{operation="claim"}')]
    return int(float(found[0].split()[-1])) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_one_process_learned_and_computed_serves_the_other(tmp_path: Path) -> None:
    with cluster(tmp_path) as (saw, fresh, metrics):
        saw.tell("join", "60").hear()
        learned = saw.tell("learn", *TASKS[:3]).hear()
        seen = saw.tell("answer", TASKS[3], str(tmp_path / "seen")).hear()
        joined = fresh.tell("join", "10").hear()  # only now: it has seen no call
        found = fresh.tell("answer", TASKS[3], str(tmp_path / "found")).hear()
        assert joined["statistics"] == learned["statistics"]  # to the bit: fetched, not learned
        assert found["approximate"] == seen["approximate"] > 0
        assert found["hits"] > 0
        assert (found["base"], found["gain"]) == (seen["base"], seen["gain"])  # to the bit
        offsets = [load_file(tmp_path / name) for name in ("found", "seen")]
        for name in ("keys", "values"):
            assert offsets[1][name].abs().max() > 0.01
            torch.testing.assert_close(offsets[0][name], offsets[1][name], rtol=0, atol=1e-4)
        assert found["kl"] == pytest.approx(seen["kl"], rel=1e-3, abs=1e-6)
        assert found["kl"] < 1.0

        before = claims_answered(metrics)
        assert saw.tell("claim", MISSED, "hold").hear() == {"claimed": True}
        fresh.tell("claim", MISSED)
        end = time.monotonic() + 120
        while claims_answered(metrics) < before + 2:  # its first slice is over and found neither: it waits
            assert time.monotonic() < end, "the second process never asked for the claim"
            time.sleep(0.05)
        computed, reused = saw.tell("go on").hear(), fresh.hear()
        assert computed["tokens"] == reused["tokens"] == computed["dense"]
        assert not computed["task_cached"]
        assert reused["task_cached"]
        assert computed["task_puts"] == 1
        assert reused["task_puts"] == 0


class Subject:
    """What a node's process does."""

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._model, self._tokenizer = load(None)

    def join(self, silence_s: str) -> dict[str, Any]:
        """Become a node."""
        terms = Terms(silence_s=float(silence_s), fetch_s=60.0, claim_tokens=16, claim_s=120.0)
        self.store = RemoteStore(self._address, terms=terms, node=self._name)
        self.engine = Engine(self._model, self._tokenizer, store=self.store)
        self.agent = self.engine.agent("writer", PARTS)
        return {"statistics": self.engine.book.statistics.digest()}

    def learn(self, *tasks: str) -> dict[str, Any]:
        """See calls, and share what they taught."""
        for task in tasks:
            self.agent.study(task=task, plan=PLAN)
        self.engine.flush()
        self.engine.book.solve()
        return {"statistics": self.engine.book.statistics.digest()}

    def answer(self, task: str, path: str) -> dict[str, Any]:
        """Reuse the plan behind a task never seen: closeness of the first token, and the offset that was added."""
        prompt = self.agent.prompt(task=task, plan=PLAN)
        with torch.inference_mode():
            dense = self._model(torch.tensor([prompt.token_ids])).logits[0, -1:]
            prefilled = self.engine.prefill(prompt, policy=Fast())
            found = self._model.generate(
                **prefilled.generate_kwargs(), max_new_tokens=1, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        part = next(part for part in prefilled.plan.parts if part.part.label == "writer/plan")
        assert part.base is not None and part.pair is not None
        base = part.base.kv
        offset = self.engine.book.estimate(part.pair, base)
        assert offset is not None
        save_file({"keys": offset.keys, "values": offset.values}, path)
        gain = self.engine.book.gains[part.pair]
        return {
            "approximate": prefilled.plan.counts.approximate,
            "hits": self.store.stats(self.engine.namespace).counters.get("hits", 0),
            "kl": float(kl_divergence(dense, found.logits[0]).mean()),
            "base": hashlib.sha256(base.keys.numpy().tobytes() + base.values.numpy().tobytes()).hexdigest(),
            "gain": [getattr(gain, name).sum().item() for name in ("agreement", "predicted", "observed")],
        }  # fmt: skip

    def claim(self, task: str, *how: str) -> dict[str, Any]:
        """Answer a prompt that nobody has seen; with "hold" stop once the text is claimed, until the next line."""
        pool, prompt = self.engine.pool, self.agent.prompt(task=task, plan=PLAN)
        segment = prompt.parts[1].segment
        puts: list[str] = []
        put, claim = self.store.put, pool.claim

        def counted(key: Any, entry: Any, **options: Any) -> Any:
            puts.extend([key.content] if key.content == segment.digest else [])
            return put(key, entry, **options)

        def held(wanted: Any) -> Claim | None:
            found = claim(wanted)
            say({"claimed": found is not None})
            sys.stdin.readline()
            return found

        self.store.put = counted  # type: ignore[method-assign]
        if how:
            pool.claim = held  # type: ignore[method-assign]
        reply = self.agent.generate(task=task, plan=PLAN, max_new_tokens=4, policy=Exact(), options=GREEDY)
        self.engine.flush()
        with torch.inference_mode():
            ids = torch.tensor([prompt.token_ids])
            dense = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **GREEDY)
        return {
            "tokens": list(reply.token_ids), "dense": dense[0, len(prompt) :].tolist(), "task_puts": len(puts),
            "task_cached": reply.usage.cached_tokens >= len(prompt.parts[0].segment) + len(segment),
        }  # fmt: skip


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(address: str, name: str) -> None:
    subject = Subject(address, name)
    for line in sys.stdin:
        command, *words = json.loads(line)
        say(getattr(subject, command)(*words))


if __name__ == "__main__":
    main(*sys.argv[1:])
