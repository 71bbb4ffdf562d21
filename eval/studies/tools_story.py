"""``python -m eval tools-story``: what a changed catalogue of tools leaves of a prompt's cache, and what that costs.

A prefix cache loses all that stands behind the first token that changed; tools are near the top of the prompt. Twelve
tools, six changes, the tools as they are given and in canonical form (sorted, keys sorted): hit rate and TTFT with
prefix reuse and with kvcomm, both having answered with the unchanged catalogue before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress

from eval.cases.chat_tools import CATALOGUE, Tool, changes
from eval.figures.statistics import mean, ratio_of_medians
from eval.files.output import command_line, markdown_table, require_writable, write_json
from eval.files.progress import stderr_console
from eval.models.chat_templates import CHATML_TOOLS
from eval.running.setting import Setting
from kvcomm import Balanced, Dense, Engine, Exact, Reply
from kvcomm.closeness import kl_divergence
from kvcomm.reuse.policy import Policy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FORMS = {"as given": False, "canonical": True}
METHODS = ("dense", "exact", "kvcomm")
POLICIES: dict[str, Policy] = {"exact": Exact(), "kvcomm": Balanced()}
QUESTIONS = (
    "What will the weather be like in Lisbon when our guests arrive on Friday?",
    "How much are 450 dollars in euros today?",
    "Remind me at five that the boat has to be paid for.",
    "Which flights go from Oslo to Porto on the third of May?",
    "Tell the guests by mail that their room is ready.",
    "Make it two degrees warmer in the breakfast room.",
    "How many bookings did we have in March?",
    "Say 'the ferry leaves at nine' in Portuguese.",
)
_LEARNING = (
    "Who was our guest on Monday?",
    "Is there a room left?",
    "Play something quiet.",
    "Open the list of prices.",
)
_HEAD = (
    "tools", "change", "hit rate, prefix", "hit rate, kvcomm", "of it exact", "TTFT prefix, s", "TTFT kvcomm, s",
    "prefix / kvcomm", "first token KL", "n",
)  # fmt: skip


@app.command()
def tools_story(
    questions: Annotated[int, typer.Option(help=f"Questions asked of each catalogue, 1 to {len(QUESTIONS)}.")] = 8,
    repeats: Annotated[int, typer.Option(help="How often each TTFT is taken; 0 counts tokens only.")] = 3,
    learned: Annotated[int, typer.Option(help="Calls with other catalogues that kvcomm learns from first, to 4.")] = 4,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/tools-story.json"),
) -> None:
    """Measure hit rate and TTFT after each change of a catalogue of twelve tools."""
    require_writable(out)
    setting = Setting.load(model)
    rows: list[dict[str, Any]] = []
    with Progress(console=stderr_console()) as progress:
        step = progress.add_task("changes of the catalogue", total=len(FORMS) * len(changes()) * questions)
        for form, canonical in FORMS.items():
            story = Story(setting, canonical, learned)
            for change, tools in changes().items():
                for question in QUESTIONS[:questions]:
                    named = {"form": form, "change": change, "case": question}
                    rows += [named | row for row in story.rows(question, tools, repeats)]
                    progress.advance(step)
    result = {
        **setting.describe(),
        "command": command_line("tools-story"),
        "setting": {"questions": questions, "repeats": repeats, "learned": learned, "tools": len(CATALOGUE)},
        "table": [summary(rows, form, change) for form in FORMS for change in changes()],
        "rows": rows,
    }
    write_json(out, result)
    print(table(result))
    print(out)


def table(result: Mapping[str, Any]) -> str:
    """A results file as a Markdown table."""
    return markdown_table(_HEAD, [_cells(entry) for entry in result["table"]])


class Story:
    """Two engines that have answered with the whole catalogue: one reuses prefixes alone, one is kvcomm's."""

    def __init__(self, setting: Setting, canonical: bool, learned: int) -> None:
        self._options: dict[str, Any] = {"canonical": canonical, "template": {"chat_template": CHATML_TOOLS}}
        self._engines: dict[str, Engine] = {name: setting.engine(policy=p) for name, p in POLICIES.items()}
        self._engines["dense"] = self._engines["exact"].fork(policy=Dense(), learn=False)
        rng = random.Random(0)
        for question in _LEARNING[:learned]:
            tools = rng.sample(CATALOGUE, len(CATALOGUE) - 4)
            self._ask(self._engines["kvcomm"], question, tools, max_new_tokens=2, policy=Dense())
        for name in POLICIES:
            self._ask(self._engines[name], _LEARNING[0], CATALOGUE, max_new_tokens=2)

    def rows(self, question: str, tools: Sequence[Tool], repeats: int) -> list[dict[str, Any]]:
        """A row for each method; TTFT by turns, nothing is kept or learned."""
        engines = {name: self._engines[name].fork(learn=False) for name in METHODS}
        logits = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 1}
        first = {name: self._ask(engine, question, tools, **logits) for name, engine in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in METHODS}
        for _ in range(repeats):
            for name, engine in engines.items():
                seconds[name].append(self._ask(engine, question, tools, max_new_tokens=1).ttft_s)
        dense = first["dense"].output.logits[0].float()
        return [
            {
                "method": name,
                "prompt_tokens": len(reply.plan.prompt),
                "exact": reply.plan.counts.exact,
                "approximate": reply.plan.counts.approximate,
                "hit": (reply.plan.counts.exact + reply.plan.counts.approximate) / len(reply.plan.prompt),
                "first_kl": float(kl_divergence(dense, reply.output.logits[0].float())[0].clamp_min(0)),
                "ttft_s": seconds[name],
            }
            for name, reply in first.items()
        ]

    def _ask(self, engine: Engine, question: str, tools: Sequence[Tool], **options: Any) -> Reply:
        talk = [
            {"role": "system", "content": "You are the assistant of a small travel agency."},
            {"role": "user", "content": question},
        ]
        return engine.chat(talk, list(tools), name="agency", do_sample=False, **self._options, **options)


def summary(rows: Sequence[dict[str, Any]], form: str, change: str) -> dict[str, Any]:
    """One line of the table: means over questions with intervals."""
    mine = {
        name: [r for r in rows if (r["form"], r["change"], r["method"]) == (form, change, name)] for name in METHODS
    }
    found: dict[str, Any] = {"form": form, "change": change, "n": len(mine["kvcomm"])}
    for name in ("exact", "kvcomm"):
        found[f"hit_{name}"] = mean([row["hit"] for row in mine[name]]).as_json()
    found["exact_share"] = mean([row["exact"] / row["prompt_tokens"] for row in mine["kvcomm"]]).as_json()
    found["first_kl"] = mean([row["first_kl"] for row in mine["kvcomm"]]).as_json()
    if all(row["ttft_s"] for row in rows):
        seconds = {name: [float(np.median(row["ttft_s"])) for row in mine[name]] for name in METHODS}
        for name in METHODS:
            found[f"ttft_{name}"] = float(np.median(seconds[name]))
        found["prefix_over_kvcomm"] = ratio_of_medians(seconds["exact"], seconds["kvcomm"]).as_json()
    return found


def _cells(entry: dict[str, Any]) -> list[str]:
    timed = "prefix_over_kvcomm" in entry
    ratio = entry.get("prefix_over_kvcomm", {})
    return [
        entry["form"],
        entry["change"],
        f"{entry['hit_exact']['value']:.1%}",
        f"{entry['hit_kvcomm']['value']:.1%}",
        f"{entry['exact_share']['value']:.1%}",
        f"{entry['ttft_exact']:.3f}" if timed else "",
        f"{entry['ttft_kvcomm']:.3f}" if timed else "",
        f"{ratio['value']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})" if timed else "",
        f"{entry['first_kl']['value']:.4f}",
        str(entry["n"]),
    ]
