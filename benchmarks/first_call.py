"""What does the first call of a process pay that later ones do not, by name?

``python -m benchmarks.bench --only first_call``. A store is filled once; new processes then answer one prompt from
it. Half of them call at once. The others first pay one by one what is known by name; what their first call still takes
above their later ones has no name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

STARTED = time.perf_counter()


def measure(setting: Any, size: Any, model: str | None) -> dict[str, Any]:
    """Medians over fresh processes, seconds."""
    from kvcomm.store import DiskStore

    with tempfile.TemporaryDirectory() as folder:
        with DiskStore(Path(folder)) as store, setting.engine(store=store) as engine:
            reader, texts = _reader(engine), _texts(setting, size)
            for text in texts:
                reader.study(document=text, question="Summarise the document.")
            reader.study(document=texts[0], question=_QUESTION)
        found: dict[str, list[dict[str, float]]] = {"plain": [], "named": []}
        for _ in range(size.processes):
            for kind, runs in found.items():
                runs.append(_process(folder, kind, size, setting.digest, model))
    plain, named = ({key: median(run[key] for run in runs) for key in runs[0]} for runs in found.values())
    before = ("import_s", "load_model_s", "engine_s")
    return {
        "before_it": {name: plain[name] for name in before},
        "first_s": plain["first_s"],
        "later_s": plain["later_s"],
        "named": {name: value for name, value in named.items() if name not in (*before, "first_s", "later_s")},
        "unnamed_s": named["first_s"] - named["later_s"],
        "n": size.processes,
    }


_QUESTION = "What does the document say, and why does it matter?"


def _texts(setting: Any, size: Any) -> list[str]:
    from benchmarks.common import RealText

    source = RealText(setting.tokenizer, seed=2)
    return [source.text(size.task) for _ in range(3)]


def _reader(engine: Any) -> Any:
    from kvcomm import Slot, System

    parts = [
        System("You answer questions about a document."),
        "Document:\n",
        Slot("document"),
        "\n\n",
        Slot("question"),
    ]
    return engine.agent("reader", parts)


def _process(folder: str, kind: str, size: Any, digest: str, model: str | None) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.first_call", folder, kind, str(size.task), str(size.repeats), digest]
    done = subprocess.run([*command, *([model] if model else [])], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _fresh() -> dict[str, float]:
    """Be the new process: everything is timed from its start."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("kind", choices=("plain", "named"))
    for name in ("task", "repeats"):
        options.add_argument(name, type=int)
    options.add_argument("digest")
    options.add_argument("model", nargs="?")
    chosen = options.parse_args()

    import torch

    from benchmarks.common import Size
    from eval.models.default import load
    from eval.running.setting import Setting
    from kvcomm import Balanced, Engine
    from kvcomm.store import DiskStore

    found = {"import_s": time.perf_counter() - STARTED}
    started = time.perf_counter()
    model, tokenizer = load(chosen.model)
    found["load_model_s"] = time.perf_counter() - started
    setting = Setting(model, tokenizer, "", chosen.digest)
    with DiskStore(chosen.folder) as store:
        started = time.perf_counter()
        engine = Engine(model, tokenizer, weights=chosen.digest, store=store, learn=False)
        found["engine_s"] = time.perf_counter() - started
        reader = _reader(engine)
        slots = {"document": _texts(setting, Size(task=chosen.task))[0], "question": _QUESTION}

        def answer() -> float:
            reply = reader.generate(max_new_tokens=1, policy=Balanced(), options={"do_sample": False}, **slots)
            if not reply.usage.approximate + reply.usage.exact:
                raise SystemExit("nothing was reused from the store")
            return float(reply.ttft_s)

        if chosen.kind == "named":
            prompt = reader.prompt(**slots)
            found["bases_from_store_s"] = _seconds(lambda: [engine.pool.bases(p.segment) for p in prompt.parts])
            found["pages_of_the_cache_s"] = _seconds(lambda: _touch(engine.backend, len(prompt) + 1))
            tokens = torch.ones(1, 4, dtype=torch.int64)
            given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 1, "do_sample": False}
            found["model_generate_s"] = _seconds(lambda: model.generate(tokens, **given))
            found["pass_of_64_tokens_s"] = _seconds(lambda: _pass(engine.backend, 64))
        found["first_s"] = answer()
        found["later_s"] = median(answer() for _ in range(chosen.repeats))
    return found


def _touch(backend: Any, tokens: int) -> None:
    backend.buffer(tokens).clear(0, tokens)


def _pass(backend: Any, tokens: int) -> None:
    backend.forward(backend.buffer(tokens), [1] * tokens, range(tokens), logits=1)


if __name__ == "__main__":
    print(json.dumps(_fresh()))
