"""``python -m eval near``: closeness where a text is nearly one that is held, a few of its words changed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from eval.cases.workload import Case
from eval.closeness import closeness
from eval.files.output import command_line, require_writable, write_json
from eval.files.progress import stderr_console
from eval.measure import Conversation, Row, compare, dense_answer
from eval.methods.registry import METHODS
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.trial import Bench, Trial
from kvcomm import Balanced, Dense, Segment

app = typer.Typer(help="Closeness of nearly equal texts.", add_completion=False, pretty_exceptions_enable=False)
METHODS_HERE = {
    "held": (False, Balanced(gate=False), "the texts themselves are held"),
    "near": (True, Balanced(gate=False, near=0.8), "edited texts are held, near=0.8"),
    "computed": (True, Balanced(gate=False), "edited texts are held, near off: the texts are computed"),
}
"""By name: whether the texts that are held were edited, the policy, what it is."""
_WORD = re.compile(r"\b[a-z]{4,}\b")


def edited(text: str, words: int, draw: random.Random) -> str:
    """``text`` with ``words`` of its words replaced by others of its words, or as many as it has."""
    places = list(_WORD.finditer(text))
    for match in sorted(draw.sample(places, min(words, len(places))), key=lambda m: -m.start()):
        other = draw.choice([m.group() for m in places if m.group() != match.group()] or ["other"])
        text = text[: match.start()] + other + text[match.end() :]
    return text


@app.command()
def near(
    task: Annotated[str, typer.Option(help="Kind of text.")] = "documents",
    prompts: Annotated[int, typer.Option(help="Problems to measure.")] = 3,
    fill_prompts: Annotated[int, typer.Option(help="Other problems that offsets are learned from first.")] = 6,
    words: Annotated[int, typer.Option(help="Words changed in each document.")] = 4,
    agents: Annotated[int, typer.Option(help="Agents, the one included that hears nobody.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Chooses problems, documents and edits.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/near.json"),
) -> None:
    """Answer with documents of which an earlier version is held, and compare with a full prefill."""
    require_writable(out)
    trial = Trial("full", agents, prompts, fill_prompts, prompt_tokens, answer_tokens, 1, seed, "generate")
    setting = Setting.load(model)
    bench = trial.prepare(setting, make_task(task).problems(), {"dense": METHODS["dense"]})
    rows: list[Row] = []
    draw = random.Random(seed)
    with Progress(console=stderr_console()) as progress:
        step = progress.add_task("learning", total=fill_prompts * len(bench.workload.nodes))
        for _ in bench.learn():
            progress.advance(step)
        step = progress.add_task("measuring", total=prompts * (len(bench.workload.nodes) - 1) * len(METHODS_HERE))
        for case in bench.workload.measured:
            for row in measure(bench, case, words, draw):
                rows.append(row)
                progress.advance(step)
    found = {
        name: closeness(mine)
        | {"about": METHODS_HERE[name][2], "n": len(mine)}
        | {kind: sum(row["tokens"][kind] for row in mine) / len(mine) for kind in mine[0]["tokens"]}
        for name in METHODS_HERE
        if (mine := [row for row in rows if row["method"] == name])
    }
    setting_of = {"task": task, "prompts": prompts, "words": words, "prompt_tokens": prompt_tokens, "seed": seed}
    write_json(out, setting.describe() | {"command": command_line("near"), "setting": setting_of, "methods": found})
    for name, point in found.items():
        print(f"{name:9} KL {point['mean_kl']:.4f}  first {point['first_kl']:.4f}  top-1 {point['top1']:.3f}  "
              f"new {point['new']:.0f}  recomputed {point['recomputed']:.0f} tokens  n {point['n']}")  # fmt: skip


def measure(bench: Bench, case: Case, words: int, draw: random.Random) -> Iterator[Row]:
    """Rows of one case: agents from the second on, each with every method. Messages are the dense run's."""
    first, *hearers = bench.workload.nodes
    agent = bench.engine.agents[first.agent]
    old = {
        name: agent.template.segment(name, edited(bench.engine.tokenizer.decode(segment.token_ids), words, draw))
        for name, segment in case.slots.items()
        if name.startswith("document")
    }
    sessions = {version: bench.engine.fork(policy=Dense()) for version in (False, True)}
    talk = Conversation(case, {})
    for node in bench.workload.nodes:
        slots = talk.slots(node)
        dense = dense_answer(bench.engine, node, slots, bench.workload.answer_tokens)
        answer = Segment(dense.token_ids)
        if node in hearers:
            for name, (changed, policy, _) in METHODS_HERE.items():
                session = sessions[changed].fork(policy=policy, learn=False)
                yield compare(dense, session, node, slots) | {"method": name, "case": case.problem.id}
        for changed, session in sessions.items():
            session.agents[node.agent].force(answer, **(_replaced(slots, old) if changed else slots))
        talk.messages[node.name] = dense.segment


def _replaced(slots: Mapping[str, Segment], old: Mapping[str, Segment]) -> dict[str, Segment]:
    return {name: old.get(name, segment) for name, segment in slots.items()}
