"""The cost gate over prompt lengths: dense and gated in turn, three quarters of the text known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from eval.setting import Setting
from kvcomm import Segment, Slot, System
from kvcomm.reuse.policy import Balanced, Dense, Policy

LENGTHS = (30, 60, 125, 250, 500, 1000, 1600, 2200, 3000)
KNOWN = 0.75
GREEDY = {"do_sample": False}


def gate(setting: Setting, lengths: Sequence[int] = LENGTHS, repeats: int = 3) -> Iterator[dict[str, Any]]:
    """A row a length: medians of the TTFT dense and gated, what the gate predicted and whether it reused.

    The known text is read by another agent first. The two ways alternate, each call in a session of its own: none
    finds what another left. The costs follow each call, as in use.
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
        for _ in range(repeats):
            for name, policy in ways.items():
                reply = engine.fork(policy=policy).agents["second"].generate(max_new_tokens=1, options=GREEDY, **slots)
                seconds[name].append(reply.ttft_s)
        forecast = reply.plan.forecast
        yield {
            "tokens": len(reply.plan.prompt),
            "dense_s": median(seconds["dense"]),
            "gated_s": median(seconds["gated"]),
            "predicted_dense_s": forecast.dense_s if forecast is not None else None,
            "predicted_reuse_s": forecast.reuse_s if forecast is not None else None,
            "reused": reply.usage.approximate > 0,
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


def print_gate(rows: Sequence[dict[str, Any]]) -> None:
    """A line a length."""
    for row in rows:
        way = "reused" if row["reused"] else "computed"
        print(
            f"{row['tokens']:5} tokens  dense {row['dense_s']:.3f} s  gated {row['gated_s']:.3f} s "
            f"({row['gated_s'] / row['dense_s']:.2f})  {way}"
        )
