"""``python -m eval verified``: is the verified answer the dense one, when does it come, and what is healing worth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.progress import Progress

from eval.cases.workload import Case
from eval.files.output import command_line, require_writable, write_json
from eval.files.progress import stderr_console
from eval.measure import GREEDY, Conversation, Row
from eval.methods.registry import METHODS
from eval.running.finished import Finished
from eval.running.setting import Setting
from eval.studies.sweep import rounded
from eval.tasks import TASKS, make_task
from eval.trial import Bench, Trial
from kvcomm import Balanced, Dense, Engine, Healed, Reply, Segment, Verified
from kvcomm.closeness import common_run, is_tie, kl_divergence
from kvcomm.reuse.policy import Policy

app = typer.Typer(help="Verified answers and healing.", add_completion=False, pretty_exceptions_enable=False)
TOKENS = 64
LENGTHS = (64, 256)
"""Tokens of the answers over which healing is measured."""
MESSAGE_TOKENS = 48


@app.command()
def verified(
    tasks: Annotated[str, typer.Option(help="Kinds of text, with commas between.")] = ",".join(TASKS),
    prompts: Annotated[int, typer.Option(help="Prompts of each kind to verify.")] = 20,
    healing: Annotated[int, typer.Option(help="The first so many of these are measured with healing too.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 1000,
    piece: Annotated[int, typer.Option(help="Tokens computed again between two tokens of an answer.")] = 256,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/verified.json"),
) -> None:
    """Prompts of the second of two agents, whose documents the first one has read. Every answer has all its tokens.

    Parts that are done are kept beside ``out`` until the whole is; a run that was cut off goes on behind them.
    """
    require_writable(out)
    trial = Trial("chain", 2, prompts, fill_prompts, prompt_tokens, MESSAGE_TOKENS, 1, seed, "prefill")
    setting = Setting.load(model)
    asked = {
        "tasks": tasks,
        "prompts": prompts,
        "healing": healing,
        "fill_prompts": fill_prompts,
        "prompt_tokens": prompt_tokens,
        "piece": piece,
        "seed": seed,
        "tokens": TOKENS,
        "lengths": list(LENGTHS),
    }
    finished = Finished(out.with_suffix(".parts.jsonl"), asked | setting.describe())
    rows: list[Row] = []
    with Progress(console=stderr_console()) as progress:
        step = progress.add_task("verifying", total=prompts * len(tasks.split(",")))
        for task in tasks.split(","):
            bench = trial.prepare(setting, make_task(task).problems(), {"dense": METHODS["dense"]})
            learned = False
            for n, case in enumerate(bench.workload.measured):
                name = f"{task}/{n}"
                if finished.get(name) is None:
                    if not learned:
                        deque(bench.learn(), 0)
                        learned = True
                    finished.add(name, measure(bench, case, len(rows), piece, n < healing) | {"task": task})
                rows.append(finished.get(name))
                progress.advance(step)
    found = {"verified": summary(rows), "healing": healing_of(rows)}
    write_json(
        out, setting.describe() | {"command": command_line("verified"), "setting": asked, **found, "prompts": rows}
    )
    finished.clear()
    show(found)


def measure(bench: Bench, case: Case, number: int, piece: int, heal: bool) -> Row:
    """One prompt: dense, verified and Balanced take turns in beginning; then healing, if it is asked for."""
    first, node = bench.workload.nodes
    session = bench.engine.fork(policy=Dense())
    talk = Conversation(case, {first.name: case.references[first.name]})
    session.agents[first.name].force(talk.messages[first.name], **talk.slots(first))
    slots = talk.slots(node)
    dense_options = {"return_dict_in_generate": True, "output_logits": True}
    runs: list[tuple[str, Callable[[], Reply]]] = [
        ("dense", lambda: answer(session, node.name, Dense(), slots, TOKENS, dense_options)),
        (
            "verified",
            lambda: answer(session, node.name, Verified(Balanced(gate=False), piece), slots, TOKENS),
        ),
        ("balanced", lambda: answer(session, node.name, Balanced(gate=False), slots, 1)),
    ]
    turn = number % len(runs)
    replies = {name: run() for name, run in runs[turn:] + runs[:turn]}
    row = compared(replies["dense"], replies["verified"], replies["balanced"])
    if heal:
        row["healing"] = healed(session, node.name, slots, piece)
    return {name: rounded(value) for name, value in row.items()}


def answer(
    session: Engine,
    agent: str,
    policy: Policy,
    slots: Mapping[str, Segment],
    tokens: int,
    options: Mapping[str, Any] | None = None,
) -> Reply:
    """A greedy answer of exactly ``tokens`` tokens; nothing is kept or learned."""
    own = session.fork(policy=policy, learn=False).agents[agent]
    return own.generate(max_new_tokens=tokens, options={**GREEDY, "min_new_tokens": tokens, **(options or {})}, **slots)


def compared(dense: Reply, reply: Reply, balanced: Reply) -> Row:
    """A verified answer against the dense one, and its times against that one's and Balanced's."""
    made = reply.exactness
    if made is None:
        raise TypeError("the reply was not generated under Verified()")
    run = common_run(dense.token_ids, reply.token_ids)
    equal = run == len(dense.token_ids) == len(reply.token_ids)
    return {
        "prompt_tokens": len(reply.plan.prompt),
        "approximate": reply.usage.approximate,
        "equal": equal,
        "tie": not equal and is_tie(dense.output.logits[run][0]),
        "drafts": made.drafts,
        "taken_back": made.taken_back,
        "healed_tokens": made.healed_tokens,
        "first_draft_s": reply.ttft_s,
        "balanced_ttft_s": balanced.ttft_s,
        "dense_ttft_s": dense.ttft_s,
        "first_final_s": made.final_s[0],
        "last_final_s": made.final_s[-1],
        "dense_last_s": dense.wall_s,
    }


def healed(session: Engine, agent: str, slots: Mapping[str, Segment], piece: int) -> Row:
    """Mean KL, teacher-forced on the dense answer, and seconds of an answer, with healing and without."""
    frozen = session.fork(policy=Dense(), learn=False).agents[agent]
    policies: dict[str, Policy] = {
        "without": Balanced(gate=False),
        "with": Healed(Balanced(gate=False), piece),
    }
    long = max(LENGTHS)
    dense = Segment(answer(session, agent, Dense(), slots, long).token_ids)
    expected, _ = frozen.force(dense, policy=Dense(), **slots)
    found: Row = {}
    for name, policy in policies.items():
        logits, _ = frozen.force(dense, policy=policy, **slots)
        kl = kl_divergence(expected, logits).clamp_min(0)
        found |= {f"kl_{length}_{name}": rounded(float(kl[:length].mean())) for length in LENGTHS}
        found[f"kl_last_16_{name}"] = rounded(float(kl[-16:].mean()))
    for name, policy in policies.items():
        found[f"wall_{TOKENS}_{name}_s"] = rounded(answer(session, agent, policy, slots, TOKENS).wall_s)
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over all prompts, and medians of times and of their ratios prompt by prompt."""
    times = ("first_draft_s", "balanced_ttft_s", "dense_ttft_s", "first_final_s", "last_final_s", "dense_last_s")
    return {
        "prompts": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "ties": sum(row["tie"] for row in rows),
        "different": sum(not row["equal"] and not row["tie"] for row in rows),
        "with_drafts": sum(row["drafts"] > 0 for row in rows),
        "drafts": sum(row["drafts"] for row in rows),
        "taken_back": sum(row["taken_back"] for row in rows),
        "answers_with_taken_back": sum(row["taken_back"] > 0 for row in rows),
        **{name: median(row[name] for row in rows) for name in times},
        "first_draft_of_balanced": median(row["first_draft_s"] / row["balanced_ttft_s"] for row in rows),
        "last_final_of_dense": median(row["last_final_s"] / row["dense_last_s"] for row in rows),
    }


def healing_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Means of KL and medians of seconds over the prompts that were measured with healing."""
    mine = [row["healing"] for row in rows if "healing" in row]
    if not mine:
        return {"prompts": 0}
    merge = {name: median if name.endswith("_s") else fmean for name in mine[0]}
    return {"prompts": len(mine)} | {name: float(take([row[name] for row in mine])) for name, take in merge.items()}


def show(found: Mapping[str, Any]) -> None:
    """What was found, in a few lines."""
    v, h = found["verified"], found["healing"]
    print(f"equal {v['equal']}, ties {v['ties']}, different {v['different']} of {v['prompts']}")
    print(f"drafts {v['drafts']}, taken back {v['taken_back']} in {v['answers_with_taken_back']} answers")
    print(f"first draft {v['first_draft_s']:.3f} s, {v['first_draft_of_balanced']:.2f} of Balanced's TTFT")
    print(f"token {TOKENS} final {v['last_final_s']:.3f} s, {v['last_final_of_dense']:.2f} of dense")
    for length in LENGTHS if h["prompts"] else ():
        print(f"KL over {length}: {h[f'kl_{length}_without']:.4f} without healing, {h[f'kl_{length}_with']:.4f} with")
    if h["prompts"]:
        without, healing = h[f"wall_{TOKENS}_without_s"], h[f"wall_{TOKENS}_with_s"]
        print(f"{TOKENS} tokens in {without:.3f} s without, {healing:.3f} s with")
