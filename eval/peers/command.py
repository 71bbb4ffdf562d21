"""``python -m eval peers``: each program's own dense / reused ratio, and how far its reuse keeps its own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.cases.workload import Workload, build
from eval.figures.statistics import mean, ratio_of_medians, share
from eval.files.output import command_line, markdown_table, require_writable, write_json
from eval.files.progress import waiting
from eval.peers.base import Absent, Answer, Peer, Running
from eval.peers.kvboost import KVBoost
from eval.peers.llama_server import LlamaServer
from eval.peers.ours import Ours
from eval.peers.vllm_cpu import VLLM
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.topologies import TOPOLOGIES
from kvcomm.closeness import common_run
from kvcomm.hf.template import Template
from kvcomm.reuse.prompt import Prompt

WARM_UP = 3
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PEERS: tuple[Peer, ...] = (
    Ours(), LlamaServer(0), LlamaServer(16), VLLM(), KVBoost("selective"), KVBoost("cacheblend"),
)  # fmt: skip
_HEAD = ("program", "dense TTFT, s", "reused TTFT, s", "dense / reused", "prompt reused", "first token kept",
         "answer kept", "asked again: reused", "dense / reused", "n")  # fmt: skip


@app.command()
def peers(
    task: Annotated[str, typer.Option(help="Where the prompts come from.")] = "documents",
    agents: Annotated[int, typer.Option(help="Agents, fully connected; the last one's prompt is timed.")] = 3,
    prompts: Annotated[int, typer.Option(help="Problems.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last prompt.")] = 1200,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 32,
    only: Annotated[str, typer.Option(help="Beginnings of programs' names, comma-separated; all if not given.")] = "",
    seed: Annotated[int, typer.Option(help="Chooses problems.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/peers.json"),
) -> None:
    """Run every program that is here over the same prompts; what is not here is named with the reason."""
    require_writable(out)
    setting = Setting.load(model)
    workload = build(
        make_task(task).problems(), partial(TOPOLOGIES["full"], rounds=1), setting.tokenizer, agents=agents,
        prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, measured=prompts + WARM_UP, fill=0, seed=seed,
    )  # fmt: skip
    asked = prompts_of(workload, setting)
    ran: dict[str, dict[str, Any]] = {}
    skipped = {}
    for peer in PEERS:
        if only and not any(peer.name.startswith(name) for name in only.split(",")):
            continue
        try:
            with waiting(peer.name), peer.run(setting) as running:
                rows = measure(running, asked, answer_tokens)
                ran[peer.name] = {"version": running.version, **summary(rows), "rows": rows}
        except Absent as error:
            skipped[peer.name] = str(error)
    result = {
        **setting.describe(),
        "seed": seed,
        "command": command_line("peers"),
        "setting": {"task": task, "agents": agents, "prompts": prompts, "prompt_tokens": prompt_tokens,
                    "answer_tokens": answer_tokens},
        "peers": ran,
        "skipped": skipped,
    }  # fmt: skip
    write_json(out, result)
    print(table(result))
    print(out)


def table(result: Mapping[str, Any]) -> str:
    """A results file as a Markdown table, with every program's version, and why those not in it did not run."""
    ran = result["peers"]
    versions = "; ".join(f"{name}: {found['version']}" for name, found in ran.items())
    absent = [f"- {name} did not run: {why}" for name, why in result["skipped"].items()]
    rows = [_cells(name, found) for name, found in ran.items()]
    return "\n".join([markdown_table(_HEAD, rows), "", f"Versions: {versions}.", "", *absent]).strip()


def prompts_of(workload: Workload, setting: Setting) -> dict[str, list[Prompt]]:
    """Each problem's prompts, an agent after the other; texts of the task stand for the messages."""
    templates = {node.name: Template(node.agent, node.template(), setting.tokenizer) for node in workload.nodes}
    found = {}
    for case in workload.measured:
        heard = {n.name: {slot: case.references[name] for slot, name in n.slots.items()} for n in workload.nodes}
        found[case.problem.id] = [templates[n.name].fill(case.slots | heard[n.name]) for n in workload.nodes]
    return found


def measure(running: Running, asked: dict[str, list[Prompt]], tokens: int) -> list[dict[str, Any]]:
    """A row for each problem but the first WARM_UP, which fill caches and teach.

    All prompts pass through with reuse first, in the order in which agents would call, each problem's last one twice:
    the second time shows that the program's reuse works where it can. Then the last ones are run dense, so that
    nothing a dense run leaves behind is ever reused.
    """
    reused = {
        case: [running.answer(prompt, tokens, reuse=True) for prompt in (*prompts, prompts[-1])][-2:]
        for case, prompts in asked.items()
    }
    return [
        {"case": case, "prompt_tokens": len(prompts[-1])}
        | _row(running.answer(prompts[-1], tokens, reuse=False), *reused[case])
        for case, prompts in list(asked.items())[WARM_UP:]
    ]


def _row(dense: Answer, reused: Answer, again: Answer) -> dict[str, Any]:
    kept = common_run(dense.tokens, reused.tokens)  # type: ignore[arg-type]
    return {
        "dense_s": dense.ttft_s,
        "reused_s": reused.ttft_s,
        "reused": reused.reused,
        "again_s": again.ttft_s,
        "again": again.reused,
        "first_token": float(kept > 0),
        "kept": kept / max(len(dense.tokens), 1),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratio of medians and means over prompts, with intervals."""
    dense = [r["dense_s"] for r in rows]
    return {
        "ratio": ratio_of_medians(dense, [r["reused_s"] for r in rows]).as_json(),
        "again_ratio": ratio_of_medians(dense, [r["again_s"] for r in rows]).as_json(),
        "dense_s": sorted(r["dense_s"] for r in rows)[len(rows) // 2],
        "reused_s": sorted(r["reused_s"] for r in rows)[len(rows) // 2],
        "reused": mean([r["reused"] / r["prompt_tokens"] for r in rows]).as_json(),
        "again": mean([r["again"] / r["prompt_tokens"] for r in rows]).as_json(),
        "first_token": share([r["first_token"] for r in rows]).as_json(),
        "kept": mean([r["kept"] for r in rows]).as_json(),
    }


def _cells(name: str, found: dict[str, Any]) -> list[str]:
    return [
        name,
        f"{found['dense_s']:.3f}",
        f"{found['reused_s']:.3f}",
        _times(found["ratio"]),
        *(f"{found[key]['value']:.0%}" for key in ("reused", "first_token", "kept", "again")),
        _times(found["again_ratio"]),
        str(found["ratio"]["n"]),
    ]


def _times(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})"
