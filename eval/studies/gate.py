"""``python -m eval gate``: the cost gate over prompt lengths, dense and gated in turn, most of the text known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import track

from eval.files.output import command_line, markdown_table, require_writable, write_json
from eval.files.progress import stderr_console
from eval.running.setting import Setting
from kvcomm import Segment, Slot, System
from kvcomm.reuse.policy import Balanced, Dense, Policy

LENGTHS = (30, 60, 125, 250, 500, 1000, 1600, 2200, 3000)
KNOWN = 0.75
GREEDY = {"do_sample": False}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def gate(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = ",".join(map(str, LENGTHS)),
    repeats: Annotated[int, typer.Option(min=1, help="Times each length is measured.")] = 9,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/gate.json"),
) -> None:
    """From which length on the cost gate reuses, and what is lost where it does not; trials are counted."""
    require_writable(out)
    setting = Setting.load(model)
    chosen = [int(length) for length in lengths.split(",")]
    found = gate_rows(setting, chosen, repeats)
    rows = list(track(found, "prompt lengths", total=len(chosen), console=stderr_console()))
    result = {**setting.describe(), "command": command_line("gate"), "repeats": repeats, "known": KNOWN,
              "figures": gate_figures(rows), "rows": rows}  # fmt: skip
    write_json(out, result)
    print(markdown_table(("prompt tokens", "dense", "gated", "ratio", "reused", "trials"), [_cells(r) for r in rows]))
    print(result["figures"])
    print(out)


def gate_rows(setting: Setting, lengths: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """A row a length: medians of the TTFT dense and gated, what the gate predicted, how often it reused.

    Trials, where reuse is predicted to be slower and yet tried, are among the gated calls, with what they cost. The
    known text is read by another agent first. The two ways alternate, each call in a session of its own: none finds
    what another left. The costs follow each call, as in use.
    """
    engine = setting.engine(policy=Balanced(learn_first=0, gate=True))
    first = engine.agent("first", [System("Read."), Slot("text"), "\nSummary:"])
    second = engine.agent("second", [System("Ask."), Slot("text"), Slot("own")])
    source = _tokens(setting, max(lengths))
    first.generate(text=Segment(source[-64:]), max_new_tokens=1, options=GREEDY)  # the rates are measured behind it
    for length in lengths:
        known = Segment(source[: max(int(KNOWN * length), 1)])
        room = length - len(known) - sum(len(fixed) for fixed in second.template.fixed)
        slots = {"text": known, "own": Segment(source[-max(room, 1) :])}
        first.study(text=known)
        ways: dict[str, Policy] = {"dense": Dense(), "gated": engine.policy}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        reused, trials = 0, 0
        for _ in range(repeats):
            for name, policy in ways.items():
                reply = engine.fork(policy=policy).agents["second"].generate(max_new_tokens=1, options=GREEDY, **slots)
                seconds[name].append(reply.ttft_s)
                reused += reply.usage.approximate > 0
                trials += reply.plan.forecast is not None and reply.plan.forecast.trial
        forecast = reply.plan.forecast
        yield {
            "tokens": len(reply.plan.prompt),
            "dense_s": median(seconds["dense"]),
            "gated_s": median(seconds["gated"]),
            "predicted_dense_s": forecast.dense_s if forecast is not None else None,
            "predicted_reuse_s": forecast.reuse_s if forecast is not None else None,
            "gated_all_s": seconds["gated"],
            "reused": reused / repeats,
            "trials": trials,
        }


def gate_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst loss, a share of dense TTFT below 0 where there is none, and the length from which most calls reuse."""
    return {
        "worst_loss": max(row["gated_s"] / row["dense_s"] for row in rows) - 1.0,
        "engages_from": min((row["tokens"] for row in rows if row["reused"] > 0.5), default=None),
    }


def _tokens(setting: Setting, count: int) -> tuple[int, ...]:
    """Token ids of running text, a little of it numbered so that no passage is repeated."""
    text, number = "", 0
    ids: list[int] = []
    while len(ids) < count:
        lines = (
            f"In year {n} the harbour saw {7 * n % 311} ships and {13 * n % 97} storms. "
            for n in range(number, number + 200)
        )
        text, number = text + "".join(lines), number + 200
        ids = setting.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tuple(ids[:count])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["tokens"]), f"{row['dense_s']:.3f} s", f"{row['gated_s']:.3f} s",
        f"{row['gated_s'] / row['dense_s']:.2f}", f"{row['reused']:.0%}", str(row["trials"]),
    ]  # fmt: skip
