"""Closeness of a fresh engine after fetching merged offsets, beside the engine that saw the calls, on the real model.

``python -m benchmarks.merged --out results/merged.json``. One engine studies calls of a template and sends what it
learned to a service; a fresh one fetches it, another one does not. All three answer new texts with reuse; the mean KL
from dense over the first answer position is compared, with the spread over texts. What differs between the first two is
only the order in which sums were taken.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.common import RealText
from eval.files.output import write_json
from eval.running.setting import Setting
from kvcomm import Engine, Slot, System
from kvcomm.closeness import kl_divergence
from kvcomm.transfer.remote import RemoteStore

PARTS = [
    System("You answer questions about a document."), "Task: ", Slot("task"), "\n\nDocument:\n", Slot("document"),
    "\n\nAnswer:",
]  # fmt: skip


def closeness(engine: Engine, task: str, document: str) -> float:
    """KL(dense || reuse) in nats at the first position of the answer."""
    agent = engine.agents.get("reader") or engine.agent("reader", PARTS)
    prompt = agent.prompt(task=task, document=document)
    ids = torch.tensor([prompt.token_ids])
    model: Any = engine.model
    with torch.inference_mode():
        dense = model(ids).logits[0, -1:]
        prefilled = engine.prefill(prompt)
        if not prefilled.plan.counts.approximate:
            raise SystemExit(f"nothing was reused approximately: {prefilled.plan}")
        found = model.generate(
            **prefilled.generate_kwargs(), max_new_tokens=1, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return float(kl_divergence(dense, found.logits[0]).mean())


def measure(address: str, tokens: int, calls: int, texts: int) -> dict[str, Any]:
    """The three engines, each with a store of its own as other processes would have it."""
    setting = Setting.load(None)
    text = RealText(setting.tokenizer, seed=3)
    document = text.text(tokens)
    tasks = [text.text(24) for _ in range(calls + texts)]
    stores = [RemoteStore(address, node=name) for name in ("saw", "fresh", "alone")]
    saw = setting.engine(store=stores[0])
    agent = saw.agent("reader", PARTS)
    for task in tasks[:calls]:
        agent.study(task=task, document=document)
    saw.flush()
    fresh = setting.engine(store=stores[1], learn=False)
    alone = setting.engine(store=stores[2], learn=False)
    alone.book.clear()
    found = {
        name: [closeness(engine, task, document) for task in tasks[calls:]]
        for name, engine in (("saw", saw.fork(learn=False)), ("fresh", fresh), ("without", alone))
    }
    differences = [a - b for a, b in zip(found["fresh"], found["saw"], strict=True)]
    moved = sum(client.received for client in stores[1]._clients.values())
    for store in stores:
        store.close()
    return {
        **setting.describe(), "tokens": tokens, "calls": calls, "texts": texts, "received_bytes_fresh": moved,
        **{f"kl_{name}": mean(values) for name, values in found.items()},
        "kl_difference": mean(differences), "kl_difference_sd": stdev(differences) if texts > 1 else 0.0,
        "all": found, "same_sums": fresh.book.statistics.digest() == saw.book.statistics.digest(),
    }  # fmt: skip


def main() -> None:
    """Start a service, measure, write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=300)
    arguments.add_argument("--calls", type=int, default=6)
    arguments.add_argument("--texts", type=int, default=6)
    arguments.add_argument("--out", type=Path, default=Path("results/merged.json"))
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvcomm.cli", "anchors", "serve", "--dir", f"{folder}/kept"]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = service.stdout.readline().split()[-1] if service.stdout is not None else ""
            result = measure(address, chosen.tokens, chosen.calls, chosen.texts)
        finally:
            service.terminate()
            service.wait(30)
    write_json(chosen.out, {"command": "python -m benchmarks.merged", **result})
    print(f"KL: saw {result['kl_saw']:.5f}, fresh {result['kl_fresh']:.5f}, without {result['kl_without']:.5f}")


if __name__ == "__main__":
    main()
