"""``python -m eval demo``: five agents share KV on a real model, live, with a page about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from eval.cases.workload import Case, Workload
from eval.demo.console import LiveTable
from eval.demo.report import write_page
from eval.demo.result import AgentRow, DemoResult, Tokens
from eval.demo.words import as_text, plain_words
from eval.files.output import command_line, require_writable
from eval.measure import GREEDY, Conversation, Row
from eval.methods.registry import methods
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.trial import Trial
from kvcomm import Dense, Engine, Exact
from kvcomm.reuse.policy import Policy

app = typer.Typer(
    help="Five agents that share KV, and a page about it.", add_completion=False, pretty_exceptions_enable=False
)
AGENTS = 5


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(help="Problems to measure.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that the pool is filled from, by prefill.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(help="Length of agent 5's prompt.")] = 1200,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 64,
    repeats: Annotated[int, typer.Option(help="How often each TTFT is taken for each problem.")] = 2,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write; the page goes beside it.")] = Path("results/demo.json"),
) -> None:
    """Measure dense, exact and reused first tokens of five agents that hear each other."""
    started = time.perf_counter()
    require_writable(out, ".html")
    trial = Trial("full", AGENTS, prompts, fill_prompts, prompt_tokens, answer_tokens, repeats, seed, "prefill")
    setting = Setting.load(model)
    chosen = methods(["dense", "exact", "kvcomm"])
    bench = trial.prepare(setting, make_task("humaneval").problems(), chosen)
    names = [node.name for node in bench.workload.nodes]
    rows: list[Row] = []
    walls: dict[str, float] = {}
    yardsticks = AGENTS  # one problem's
    steps = AGENTS * fill_prompts + prompts * AGENTS * len(chosen) + yardsticks + 2
    console = Console()
    with LiveTable(names, steps, f"kvcomm on {setting.name}: five agents, each hears all before it", console) as table:
        for _ in bench.learn():
            table.step("learning offsets from other problems")
        for row in bench.rows(rounded_cases=1):
            rows.append(row)
            table.update(row["agent"], **_cells(rows, row["agent"]))
            table.step(f"measuring {row['case']}")
        case = bench.workload.measured[0]
        for kind, policy in (("dense", Dense()), ("reused", bench.engine.policy)):
            table.step(f"{case.problem.id}, whole workflow {kind}")
            walls[kind] = _workflow(bench.engine, bench.workload, case, policy)
    result = DemoResult(
        **setting.describe(),
        seed=seed,
        agents=[_agent(rows, name) for name in names],
        policy=f"{type(bench.engine.policy).__name__}()",
        command=command_line("demo"),
        problems=prompts,
        repeats=repeats,
        max_new_tokens=answer_tokens,
        workflow_s=walls,
        yardstick=_yardstick(rows, names[0]),
    )
    result.write(out)
    page = write_page(out)
    console.print(as_text(plain_words(result)), highlight=False)
    console.print(f"Page: {page}   Figures: {out}   ({time.perf_counter() - started:.0f} s)", highlight=False)


def _workflow(engine: Engine, workload: Workload, case: Case, policy: Policy) -> float:
    """Seconds for all agents to answer in turn, each hearing what the others really said under this policy.

    Keeping the new texts' KV is inside; learning offsets is not, the pool being frozen.
    """
    session = engine.fork(policy=policy, learn=not isinstance(policy, (Dense, Exact)))
    talk = Conversation(case, {})
    started = time.perf_counter()
    for node in workload.nodes:
        reply = session.agents[node.agent].generate(
            max_new_tokens=workload.answer_tokens, options=GREEDY, **talk.slots(node)
        )
        talk.messages[node.name] = reply.segment
    return time.perf_counter() - started


def _of(rows: Sequence[Row], agent: str, method: str) -> list[Row]:
    return [row for row in rows if (row["agent"], row["method"]) == (agent, method)]


def _ttft(rows: Sequence[Row]) -> float:
    return median(seconds for row in rows for seconds in row["ttft_s"])


def _cells(rows: Sequence[Row], agent: str) -> dict[str, Any]:
    """What is known of an agent so far, named as the live table and AgentRow name it."""
    found: dict[str, Any] = {}
    for method, name in (("dense", "ttft_dense_s"), ("exact", "ttft_exact_s"), ("kvcomm", "ttft_s")):
        mine = _of(rows, agent, method)
        if mine:
            found[name] = _ttft(mine)
            found["prompt_tokens"] = median(row["prompt_tokens"] for row in mine)
    reused = _of(rows, agent, "kvcomm")
    if reused:
        kinds = ("exact", "approximate", "recomputed", "new")
        found["tokens"] = Tokens(**{kind: median(row["tokens"][kind] for row in reused) for kind in kinds})
        found["first_token_agreement"] = fmean(row["first_token"] for row in reused)
        found["mean_kl"] = fmean(row["mean_kl"] for row in reused)
        found["top1_agreement"] = fmean(row["top1"] for row in reused)
    return found


def _agent(rows: Sequence[Row], name: str) -> AgentRow:
    return AgentRow(name=name, **_cells(rows, name))


def _yardstick(rows: Sequence[Row], first: str) -> dict[str, float]:
    mine = [row for row in rows if row["method"] == "yardstick" and row["agent"] != first]
    return {"mean_kl": fmean(row["mean_kl"] for row in mine), "top1_agreement": fmean(row["top1"] for row in mine)}
