"""Three processes on one machine: a server and two engines. TTFT cold, from own memory, and in a fresh process.

``python -m benchmarks.cluster`` writes results/cluster.json; with ``--engine redis`` or ``mooncake`` that takes the
service's place, and the file is results/cluster-ENGINE.json. The first engine computes a prompt, answers it again from
its own memory, and gives what it computed to the server. The second one, another process, has never seen it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster_engines import ENGINES
from benchmarks.common import RealText
from eval.files.output import write_json
from eval.running.setting import Setting
from kvcomm import Dense, Engine, Exact, Slot, System
from kvcomm.store import Store
from kvcomm.types import Namespace

PARTS = [System("You answer questions about a document."), "Document:\n", Slot("document"), "\n\nAnswer: ", Slot("ask")]
ASK = "What does the document say, and why does it matter?"
GREEDY = {"do_sample": False}
TARGET = 3.0  # how many times sooner than cold the fresh process must answer


def ask(engine: Engine, document: str, policy: Any = None) -> Any:
    """One call of one token."""
    agent = engine.agents.get("reader") or engine.agent("reader", PARTS)
    return agent.generate(document=document, ask=ASK, max_new_tokens=1, options=GREEDY, policy=policy)


def received(store: Store) -> int | None:
    """Bytes that this client has received, where the store counts them."""
    return store.stats(Namespace("default")).counters.get("received_bytes")


def node(engine_name: str, address: str, tokens: int, first: bool, rounds: int) -> dict[str, Any]:
    """One engine's process. The first computes and keeps; the other asks once, with nothing in its memory.

    Cold is a dense prefill of the same engine after one that warmed it up; the other engine is warmed up by a dense
    prefill too, so that what is compared is the prompt's and not the process's beginning.
    """
    setting = Setting.load(None)
    document = RealText(setting.tokenizer, seed=5).text(tokens)
    with ENGINES[engine_name].connect(address) as store:
        engine = setting.engine(store=store, policy=Exact())
        ask(engine, RealText(setting.tokenizer, seed=9).text(tokens), Dense())
        if first:
            cold = [ask(engine, document, Dense()).ttft_s for _ in range(rounds)]
            ask(engine, document)
            engine.flush()
            again = [ask(engine, document) for _ in range(rounds)]
            found = {"cold_s": median(cold), "local_s": median(r.ttft_s for r in again), "all_cold_s": cold}
            reply = again[-1]
        else:
            before = received(store)
            reply = ask(engine, document)
            after = received(store)
            kv = reply.usage.cached_tokens * engine.pool.fingerprint.bytes_per_token
            found = {"remote_s": reply.ttft_s, "bytes_moved": kv if before is None or after is None else after - before}
        return {
            **found, "cached": reply.usage.cached_tokens, "tokens": reply.usage.prompt_tokens,
            "token_ids": list(reply.token_ids), "setting": setting.describe(),
        }  # fmt: skip


def run(address: str, first: bool, chosen: argparse.Namespace) -> dict[str, Any]:
    """``node`` in a process of its own."""
    command = [
        sys.executable, "-m", "benchmarks.cluster", "--engine", chosen.engine, "--node", address,
        "--tokens", str(chosen.tokens), "--rounds", str(chosen.rounds), *(["--first"] if first else []),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    """Start the three processes and write what they found."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--engine", choices=sorted(ENGINES), default="service")
    arguments.add_argument("--tokens", type=int, default=2000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--node", help=argparse.SUPPRESS)
    arguments.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.node:
        print(json.dumps(node(chosen.engine, chosen.node, chosen.tokens, chosen.first, chosen.rounds)))
        return
    engine = ENGINES[chosen.engine]
    with tempfile.TemporaryDirectory() as folder, engine.serve(Path(folder)) as address:
        first = run(address, True, chosen)
        others = [run(address, False, chosen) for _ in range(chosen.rounds)]
    if any(other["token_ids"] != first["token_ids"] or other["cached"] != first["cached"] for other in others):
        cached = f"{[other['cached'] for other in others]} instead of {first['cached']} tokens reused"
        raise SystemExit(f"a fresh process answered otherwise, or reused less, than the first one: {cached}")
    service = chosen.engine == "service"
    out = chosen.out or Path("results/cluster.json" if service else f"results/cluster-{chosen.engine}.json")
    result = {
        **first["setting"], "command": f"python -m benchmarks.cluster --engine {chosen.engine}", "engine": engine.label,
        "tokens": first["tokens"], "cached_tokens": first["cached"], "cold_s": first["cold_s"],
        "local_s": first["local_s"], "remote_s": median(other["remote_s"] for other in others),
        "bytes_moved": others[0]["bytes_moved"], "rounds": chosen.rounds, "all_cold_s": first["all_cold_s"],
        "all_remote_s": [other["remote_s"] for other in others],
    }  # fmt: skip
    result |= {"target_times": TARGET, "reached": result["cold_s"] >= TARGET * result["remote_s"]}
    write_json(out, result)
    print(f"{result['tokens']} tokens, {result['cached_tokens']} reused, {result['bytes_moved'] / 2**20:.1f} MiB moved")
    for name in ("cold_s", "local_s", "remote_s"):
        print(f"  {name[:-2]:7} {result[name]:.3f} s  {result['cold_s'] / result[name]:5.1f} times")


if __name__ == "__main__":
    main()
