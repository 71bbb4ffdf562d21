"""Does a new process go on where the last one stopped? TTFT of its first call against the warm one's.

``python -m benchmarks.warm_restart`` writes results/warm-restart.json. A first process learns, answers and closes its
store; new ones open it, build an engine (the model is loaded, nothing was generated yet) and answer the same prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from eval.files.output import write_json
from eval.running.setting import Setting
from eval.tasks.prose import passages
from kvcomm import Engine, Slot, System
from kvcomm.store import DiskStore

PARTS = [
    System("You answer questions about a document."),
    "Document:\n",
    Slot("document"),
    "\n\nAnswer in one sentence: ",
    Slot("question"),
]
QUESTION = "What does the document say, and why does it matter?"


def answer(engine: Engine, document: str) -> float:
    """TTFT of one call, seconds."""
    reply = engine.agent("reader", PARTS).generate(
        document=document, question=QUESTION, max_new_tokens=1, options={"do_sample": False}
    )
    if reply.usage.cached_tokens < 0.8 * reply.usage.prompt_tokens:
        raise SystemExit(f"only {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} tokens were reused")
    return reply.ttft_s


def main() -> None:
    """Measure, or with ``--folder`` be the new process."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--out", type=Path, default=Path("results/warm-restart.json"))
    chosen = arguments.parse_args()
    setting = Setting.load(None)
    documents = passages(1000, 4, seed=1)
    if chosen.folder is not None:
        with DiskStore(chosen.folder) as store:
            print(json.dumps(answer(setting.engine(store=store, learn=False), documents[0])))
        return
    with tempfile.TemporaryDirectory() as folder:
        with DiskStore(Path(folder)) as store, setting.engine(store=store) as engine:
            agent = engine.agent("reader", PARTS)
            for document in documents:
                agent.study(document=document, question="Summarise the document.")
            agent.study(document=documents[0], question=QUESTION)
            warm_engine = engine.fork(learn=False)
            answer(warm_engine, documents[0])
            warm = [answer(warm_engine, documents[0]) for _ in range(chosen.rounds)]
        command = [sys.executable, "-m", "benchmarks.warm_restart", "--folder", folder]
        fresh = [
            float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for _ in range(chosen.rounds)
        ]
    result = {
        **setting.describe(),
        "command": "python -m benchmarks.warm_restart",
        "rounds": chosen.rounds,
        "warm_ttft_s": median(warm),
        "restarted_ttft_s": median(fresh),
        "ratio": median(fresh) / median(warm),
        "all_warm_s": warm,
        "all_restarted_s": fresh,
    }
    write_json(chosen.out, result)
    print(f"warm {median(warm):.3f} s, first call of a new process {median(fresh):.3f} s, ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
