"""Everything that a GPU has to say about the kernels, in one call of less than five minutes.

    python -m benchmarks.gpu [--model FOLDER_OR_ID] [--out results/gpu.json]

First correctness of the kernels, against the tests' float64 oracle; then attention over chosen positions, right and
timed; then bandwidth of each kernel beside a device copy measured in the same run; then time to first token, dense
against reused with learned offsets, in one process. Without a CUDA device it says so and exits 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile_kernels import DTYPES, HEADS, Case, bytes_per_element, launch_of
from benchmarks.gpu_attention import attention
from kvcomm.rope.view import AddedOffset, KVView, LinearMap
from tests.rope.oracle import TOLERANCES, error, make_spec, of_spec, oracle

REPEATS = 15
BUDGET_S = 240.0  # the last part is left out, and said to be, once this much has gone


def correctness(device: str = "cuda") -> list[dict[str, Any]]:
    """Largest error of place (offset as it is, or linear) and cut beside its limit, as shares of the largest key."""
    from kvcomm.rope.move import cut, place

    rows = []
    for dtype in DTYPES.values():
        for dim, rotary, interleaved in (
            (64, 64, False),
            (80, 80, True),
            (128, 64, False),
            (128, 128, True),
            (256, 256, False),
        ):
            spec, positions = make_spec(3, dim, rotary_dim=rotary, interleaved=interleaved), torch.arange(65) * 7
            base = torch.randn(2, 3, 2, 65, dim).to(dtype)
            offset = torch.randn(2, 2, 2, 65, dim).to(dtype)
            weights = torch.randn(2, 2, 2 * dim, 2 * dim) * 0.3 / (2 * dim) ** 0.5
            mean, buckets = torch.randn(2, 2, 7, 2 * dim), torch.arange(65).clamp_max(6)
            gpu = [tensor.to(device) for tensor in (base, offset, weights, mean, buckets, positions)]
            y = (torch.cat([*base[:, 1:]], -1).double() @ weights.double() + mean.double()[:, :, buckets]).chunk(2, -1)
            source = KVView.contiguous(gpu[0][0], gpu[0][1])
            linear = LinearMap(gpu[2].mT.contiguous().mT, gpu[3], gpu[4])
            added = AddedOffset(KVView.contiguous(gpu[1][0], gpu[1][1]))
            table = torch.randperm(9, device=device)[:6]
            for name, change, values in (("added", added, offset.double()), ("linear", linear, torch.stack(y))):
                pages = torch.full((2, 3, 9, 16, 2, dim), torch.nan, dtype=dtype, device=device)
                view = KVView.paged(pages[0], pages[1], table, 65, 21)
                place(source, view, gpu[5], spec, offset=change)
                at = torch.arange(21, 86, device=device)
                got = pages[:, :, table[at // 16], at % 16].transpose(2, 3).cpu()
                want = base.double()
                want[:, 1:] += values
                want[0] = oracle(want[0], positions, of_spec(spec))
                back = torch.full_like(gpu[0], torch.nan)
                cut(view, KVView.contiguous(back[0], back[1]), gpu[5], spec)
                undone = oracle(got[0], positions, of_spec(spec), sign=-1)
                # tf32 rounds weights to 11 bits: of the offset, 0.3 of the base here, u = 2**-12
                slack = 1.0 if name == "added" else 3.0 if dtype == torch.float32 else 1.25
                limit = TOLERANCES[dtype].once * slack
                errors = [error(got[0], want[0]), error(got[1], want[1]), error(back[0].cpu(), undone)]
                fine = all(found < limit for found in errors)  # NaN, something left unwritten, is not
                rows.append({"dtype": str(dtype), "head_dim": dim, "rotary_dim": rotary, "interleaved": interleaved,
                             "offset": name, "errors": errors, "limit": limit, "ok": fine})  # fmt: skip
    return rows


def seconds(work: Callable[[], object]) -> float:
    """Median device time of a call, after three warm-up calls (the first compiles)."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def bandwidth() -> list[dict[str, Any]]:
    """Bytes a second of each kernel, counted as docs/kernels.md counts them, beside a copy of 1 GiB."""
    copied = torch.empty(2, 1 << 30, dtype=torch.uint8, device="cuda")
    copy = copied.numel() / seconds(lambda: copied[1].copy_(copied[0])) / 1e9
    rows = []
    for what in ("unrotate (cut)", "place", "place + offset", "place + offset, paged", "place int8", "place linear"):
        for dtype in ("bf16", "fp32"):
            for tokens in (512, 4096):
                case, layers = Case(what, dtype, tokens=tokens), 32
                launch = launch_of(case, layers, "cuda")
                elements = 2 * layers * HEADS * tokens * case.head_dim
                moved = elements * bytes_per_element(case, layers)
                found = moved / seconds(launch.run) / 1e9
                rows.append({"kernel": what, "dtype": dtype, "tokens": tokens, "gb_per_s": found,
                             "copy_gb_per_s": copy, "ratio": found / copy})  # fmt: skip
                del launch
                torch.cuda.empty_cache()
    return rows


def random_model(device: str = "cuda", layers: int = 16, hidden: int = 2048) -> tuple[Any, Any]:
    """A Llama of Llama-3.2-1B's shape with random weights, and a tokenizer of letters: TTFT depends on shapes only."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    letters = {chr(97 + index): index for index in range(26)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(letters, unk_token="a")))
    return model.eval(), tokenizer


def first_token(model: Any, tokenizer: Any, segment_tokens: int = 1024, repeats: int = 7) -> list[dict[str, Any]]:
    """Seconds to the first token: four texts behind another prefix than the one that they were computed behind.

    Offsets are learned first, so that the splice has a linear map to apply. The first row is what building the engine
    took, kernels compiled and proven in it, and what it chose.
    """
    from kvcomm.hf.engine import Engine
    from kvcomm.reuse import fused
    from kvcomm.reuse.policy import Balanced, Dense, Fast
    from kvcomm.reuse.prompt import Part, Prompt
    from kvcomm.types import Segment

    began = time.perf_counter()
    engine = Engine(model, tokenizer, weights="for measuring")
    built = time.perf_counter() - began
    spec = engine.backend.spec
    generator = torch.Generator().manual_seed(1)

    def text(tokens: int) -> Segment:
        return Segment(tuple(torch.randint(2, spec.vocab_size, (tokens,), generator=generator).tolist()))

    texts = [text(segment_tokens) for _ in range(4)]
    engine.isolate(texts, behind=text(4))
    head = text(32)

    def prompt_with(question: Segment) -> Prompt:
        return Prompt(tuple(Part(segment, f"agent/{index}") for index, segment in enumerate((head, *texts, question))))

    for _ in range(2):  # the second tests what the first taught
        engine.study(prompt_with(text(32)))
    prompt = prompt_with(text(32))
    plan = Balanced().plan(prompt, engine.pool, engine.book)
    maps = [engine.book.linear(part.pair, part.base.kv) for part in plan.parts if part.base and part.pair]
    measured = engine.fork(learn=False)
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name, policy in (("dense", Dense()), ("balanced", Balanced()), ("fast", Fast())):
            began = time.perf_counter()
            reply = measured.generate(prompt, max_new_tokens=1, policy=policy, do_sample=False)
            if repeat:  # the first round warms up; a reply's ids are on the host, so the GPU has finished
                times.setdefault(name, []).append(time.perf_counter() - began - reply.learn_s)
    dense = statistics.median(times["dense"])
    chosen = {
        "engine_s": built,
        "kernels": fused.handles(spec, spec.device),
        "attention": engine.backend.attend.__name__,
        "linear_maps": sum(found is not None for found in maps),
        "parts": len(maps),
    }
    return [chosen] + [
        {
            "policy": name,
            "prompt_tokens": len(prompt),
            "ttft_s": statistics.median(found),
            "dense_over_it": dense / statistics.median(found),
        }
        for name, found in times.items()
    ]


def main() -> int:
    """Print each part as it is done; 1 where a result is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Kernels on a GPU: correctness, bandwidth, time to first token.")
    parser.add_argument("--model", help="a transformers model for the last part; random weights unless given")
    parser.add_argument("--out", type=Path, help="also write everything as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"no CUDA device: torch {torch.__version__} sees none, so there is nothing to measure. Run this where "
            "there is a GPU and a CUDA or ROCm build of torch; `make kernels` compiles the kernels without one."
        )
        return 2
    started = time.perf_counter()
    device = torch.cuda.get_device_name()
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    print(json.dumps(report))
    parts = {"correctness": correctness, "attention": lambda: attention(seconds), "bandwidth": bandwidth}
    for name, part in parts.items():
        with torch.inference_mode():
            report[name] = part()
        for row in report[name]:
            print(json.dumps(row))
    if time.perf_counter() - started < BUDGET_S:
        if options.model:
            from eval.models.default import load

            network, tokenizer = load(options.model)
            network = network.to("cuda", torch.bfloat16)
        else:
            network, tokenizer = random_model()
        report["ttft"] = first_token(network, tokenizer)
        for row in report["ttft"]:
            print(json.dumps(row))
    else:
        print(f"time to first token left out: {BUDGET_S:.0f} s had gone")
    report["seconds"] = time.perf_counter() - started
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    checked = report["correctness"] + report["attention"]
    wrong = [row for row in checked if not row["ok"]]
    print(f"{len(wrong)} of {len(checked)} results wrong; {report['seconds']:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
