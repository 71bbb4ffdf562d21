"""What the lossy payload encodings do to a real model: KL, in nats, against the raw KV of the same prefill.

    python benchmarks/store_encodings.py MODEL_FOLDER --out results/bench-store-encodings.json

Keys are taken off their rotation, stored and read back by the disk tier, and rotated again; the last tokens of each
text then run over that cache, teacher-forced, and their logits are compared with those over the raw cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvcomm.closeness import kl_divergence
from kvcomm.keys import CacheKey, Recipe
from kvcomm.store import DiskStore, Entry, empty_kv
from kvcomm.types import ModelFingerprint, Namespace, Segment, SegmentKV

TEXTS = [p.read_text() for p in sorted(Path(__file__).parent.parent.joinpath("docs").glob("*.md"))]
TOKENS, SCORED = 384, 48


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate keys [..., tokens, head dim] by the angles whose cosines and sines are [tokens, head dim]."""
    half = keys.shape[-1] // 2
    return keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin


def through(kv: SegmentKV, ids: list[int], model: ModelFingerprint, encoding: str) -> SegmentKV:
    """``kv`` as a disk tier of that encoding gives it back."""
    segment = Segment(tuple(ids))
    key = CacheKey.of(Namespace("bench"), model, segment, Recipe("prompt", "", "", True))
    out = empty_kv(model, len(ids))
    with tempfile.TemporaryDirectory() as folder, DiskStore(folder, encoding=encoding, durable=False) as store:
        store.put(key, Entry(segment, kv))
        store.get_into(key, out)
    return out


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/bench-store-encodings.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    config = model.config
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, heads, dim)
    fingerprint = ModelFingerprint(config.model_type, "", "", "float32", "", "", *shape)
    kls: dict[str, list[float]] = {"raw": [], "int8": [], "fp8": []}
    same: dict[str, list[float]] = {name: [] for name in kls}
    for text in TEXTS:
        for start in (0, 1200, 2400):
            ids = tokenizer(text[start:], return_tensors="pt").input_ids[:, : TOKENS + SCORED]
            if ids.shape[1] < TOKENS + SCORED:
                continue
            with torch.no_grad():
                cache = model(ids[:, :TOKENS], use_cache=True).past_key_values
                cos, sin = (t[0] for t in model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS)[None]))
                keys = torch.stack([layer.keys[0] for layer in cache.layers])
                values = torch.stack([layer.values[0] for layer in cache.layers])
                kv = SegmentKV(rotate(keys, cos, -sin), values)
                logits = {}
                for name in ("reference", *kls):
                    used = SegmentKV(keys, values)
                    if name != "reference":
                        back = through(kv, ids[0, :TOKENS].tolist(), fingerprint, name)
                        used = SegmentKV(rotate(back.keys, cos, sin), back.values)
                    again = DynamicCache()
                    for n in range(shape[0]):
                        again.update(used.keys[n][None].clone(), used.values[n][None].clone(), n)
                    logits[name] = model(ids[:, TOKENS:], past_key_values=again).logits[0]
            for name in kls:
                kls[name].append(float(kl_divergence(logits["reference"], logits[name]).mean()))
                same[name].append(float((logits["reference"].argmax(-1) == logits[name].argmax(-1)).float().mean()))
    found = {
        "command": f"python benchmarks/store_encodings.py {chosen.model.name}", "texts": len(kls["raw"]),
        "cached_tokens": TOKENS, "scored_tokens": SCORED, "torch": torch.__version__,
        **{n: {"mean_kl": statistics.fmean(kls[n]), "top1": round(statistics.fmean(same[n]), 4)} for n in kls},
    }  # fmt: skip
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
