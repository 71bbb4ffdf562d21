"""``python -m eval tail``: p50, p95 and p99 of TTFT while two conversations go on at once over one engine.

Each turn a user asks something and a tool brings a passage, of which other conversations have seen some: a prefix cache
has what the same conversation said before, kvcomm also the passages. Every method starts with an empty engine and
learns as it would in use; what that takes is in the other conversation's way and so in these figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from eval.figures.statistics import percentile
from eval.files.output import command_line, markdown_table, require_writable, write_json
from eval.files.progress import stderr_console
from eval.models.chat_templates import CHATML_TOOLS
from eval.running.setting import Setting
from eval.tasks.prose import passages
from kvcomm import Balanced, Dense, Engine, Exact
from kvcomm.errors import InvalidInput
from kvcomm.reuse.policy import Policy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
METHODS: dict[str, Policy] = {"dense": Dense(), "exact": Exact(), "kvcomm": Balanced()}
SESSIONS = 2
PASSAGES = 12
PASSAGE_WORDS = 80
_SYSTEM = (
    "You are the help desk of a programming language. Users ask about its rules; a tool brings the passage of the "
    "reference that fits. You answer from the passage alone, in one plain sentence."
)
_ASKED = ("What does this say about {word}?", "Where does {word} matter here?", "Explain {word} to a beginner.")
_HEAD = ("method", "TTFT p50, s", "p95, s", "p99, s", "calls", "reused", "all calls took, s")


@app.command()
def tail(
    conversations: Annotated[int, typer.Option(help="Conversations in all, two of them at a time.")] = 20,
    turns: Annotated[int, typer.Option(help="Turns of each; conversations x turns calls a method.")] = 10,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 8,
    seed: Annotated[int, typer.Option(help="Chooses passages and questions.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/tail.json"),
) -> None:
    """Measure the tail of TTFT of two concurrent conversations: dense, exact and kvcomm."""
    if conversations < SESSIONS or turns < 1:
        raise InvalidInput(f"{conversations} conversations of {turns} turns; ask for at least {SESSIONS} of 1")
    require_writable(out)
    setting = Setting.load(model)
    shared = passages(PASSAGE_WORDS, PASSAGES, seed)
    scripts = [script(shared, n, turns, seed) for n in range(conversations)]
    rows: list[dict[str, Any]] = []
    walls = {}
    with Progress(console=stderr_console()) as progress:
        for name, policy in METHODS.items():
            step = progress.add_task(f"{name}: conversations", total=conversations)
            started = time.perf_counter()
            for made in converse(setting.engine(policy=policy), scripts, answer_tokens):
                rows += [{"method": name, **row} for row in made]
                progress.advance(step)
            walls[name] = time.perf_counter() - started
    result = {
        **setting.describe(),
        "seed": seed,
        "command": command_line("tail"),
        "setting": {
            "conversations": conversations,
            "turns": turns,
            "at_once": SESSIONS,
            "answer_tokens": answer_tokens,
        },
        "methods": {name: summary([r for r in rows if r["method"] == name], walls[name]) for name in METHODS},
        "rows": rows,
    }
    write_json(out, result)
    print(table(result))
    print(out)


def table(result: Mapping[str, Any]) -> str:
    """A results file as a Markdown table."""
    return markdown_table(_HEAD, [_cells(name, found) for name, found in result["methods"].items()])


def script(shared: Sequence[str], number: int, turns: int, seed: int) -> list[tuple[str, str]]:
    """A conversation's questions, each with the passage that the tool brings: one that all conversations share."""
    rng = random.Random(f"{seed}/{number}")
    found = []
    for _ in range(turns):
        text = rng.choice(shared)
        word = rng.choice([word for word in text.split() if word.isalpha() and len(word) > 4])
        found.append((rng.choice(_ASKED).format(word=word), text))
    return found


def converse(engine: Engine, scripts: Sequence[Sequence[tuple[str, str]]], tokens: int) -> list[list[dict[str, Any]]]:
    """Rows of each conversation, two going on at once."""
    with ThreadPoolExecutor(SESSIONS) as pool:
        return list(pool.map(lambda n: _conversation(engine, n, scripts[n], tokens), range(len(scripts))))


def _conversation(engine: Engine, number: int, turns: Sequence[tuple[str, str]], tokens: int) -> list[dict[str, Any]]:
    talk = [{"role": "system", "content": _SYSTEM}]
    rows = []
    options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    for turn, (question, passage) in enumerate(turns, 1):
        talk += [{"role": "user", "content": question}, {"role": "tool", "content": passage}]
        reply = engine.chat(talk, name="desk", template={"chat_template": CHATML_TOOLS}, **options)
        talk.append({"role": "assistant", "content": reply.text})
        counts = reply.plan.counts
        rows.append(
            {
                "case": f"conversation {number}",
                "turn": turn,
                "ttft_s": reply.ttft_s,
                "prompt_tokens": counts.total,
                "exact": counts.exact,
                "approximate": counts.approximate,
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """Percentiles over all calls; intervals resample conversations."""
    talks: dict[str, list[float]] = {}
    for row in rows:
        talks.setdefault(row["case"], []).append(row["ttft_s"])
    found: dict[str, Any] = {f"ttft_p{q}": percentile(list(talks.values()), q).as_json() for q in (50, 95, 99)}
    reused = sum(row["exact"] + row["approximate"] for row in rows) / sum(row["prompt_tokens"] for row in rows)
    return found | {"calls": len(rows), "reused": reused, "wall_s": wall_s}


def _cells(name: str, found: dict[str, Any]) -> list[str]:
    times = [
        f"{p['value']:.3f} ({p['low']:.3f} to {p['high']:.3f})"
        for p in (found["ttft_p50"], found["ttft_p95"], found["ttft_p99"])
    ]
    return [name, *times, str(found["calls"]), f"{found['reused']:.1%}", f"{found['wall_s']:.0f}"]
