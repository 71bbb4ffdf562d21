"""Two processes: one prefills and hands its KV over while it computes, the other decodes without prefilling.

Run: python examples/handover.py MODEL
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from kvcomm import Engine, Exact, Slot, System
from kvcomm.hf.load import load
from kvcomm.serve.worker_client import WorkerClient

TASK = "Write a Python function that returns the n-th prime number, and explain its running time. " * 8


def main(name: str) -> None:
    """A prefill worker in a process of its own; this one decodes, and then answers once more all by itself."""
    model, tokenizer = load(name)
    widths: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    decoding, alone = (Engine(model, tokenizer, policy=Exact()) for _ in range(2))
    parts = [System("You write Python and nothing else."), "Task:\n", Slot("task"), "\n\nCode:"]
    prompt = decoding.agent("coder", parts).prompt(task=TASK)
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "prefill.sock"
        command = [sys.executable, "-m", "kvcomm.cli", "worker", "--role", "prefill", "--model", name]
        worker = subprocess.Popen([*command, "--socket", str(socket)], stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None and worker.stdout.readline().startswith("listening on")
            client = WorkerClient(f"unix:{socket}")
            widths.clear()
            client.prefill(decoding, prompt)  # returns at once: layers are spliced as they come
            reply = decoding.generate(prompt, max_new_tokens=16, do_sample=False)
            longest = max(widths[:16])
            client.close()
        finally:
            worker.terminate()
            worker.wait()
    one = alone.generate(prompt, max_new_tokens=16, do_sample=False)
    print(f"decoded from another process's prefill: {reply.usage}, {reply.ttft_s * 1000:.0f} ms to the first token")
    print(f"longest forward while decoding: {longest} token; in one process: {max(widths)} tokens")
    print(f"tokens identical to one process: {reply.token_ids == one.token_ids}")
    if longest != 1 or reply.token_ids != one.token_ids:
        raise SystemExit("the hand-over did not work")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/handover.py MODEL   (python -m eval model prints a folder)")
    main(sys.argv[1])
