"""What a conversation's next turn and a changed catalogue of tools cost, in tokens, on the real model.

    python -m benchmarks.chat            count, print the tables, write them to docs/chat.md
    python -m benchmarks.chat --check    fail if docs/chat.md has other tables; writes nothing

Counts, not times: they are the same on every machine on which the model's answers are (their length is fixed, so only
an answer whose text does not give its tokens back could change one).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.cases.chat_tools import CATALOGUE, changes
from eval.models.chat_templates import CHATML_TOOLS, DATED_TOOLS, THINKING
from eval.models.default import load
from kvcomm import Balanced, Engine, Reply

DOC = Path(__file__).resolve().parent.parent / "docs" / "chat.md"
TURNS, SHOWN = 20, (1, 2, 3, 10, 11, 12, 20)
ANSWER = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
POLICY = Balanced(gate=False, learn_first=0)
TOPICS = ("tides", "lighthouses", "salt", "whales", "harbours", "maps", "storms", "ropes", "eels", "dunes")


def conversation(model: Any, tokenizer: Any, template: str | None, thinking: bool, dated: bool) -> list[list[str]]:
    """A row for each shown turn: turn, prompt tokens, tokens since the last call, exact, approximate, computed."""
    engine = Engine(model, tokenizer, policy=POLICY, weights="the same in all engines here")
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer in one plain sentence."}]
    rows, held = [], 0
    for turn in range(1, TURNS + 1):
        topic = TOPICS[turn % len(TOPICS)]
        messages.append({"role": "user", "content": f"Turn {turn}: what should a child know about {topic} first?"})
        given = {"chat_template": template} if template is not None else {}
        if dated:
            given["date_string"] = "1 May 2026" if turn < 11 else "2 May 2026"
        reply = engine.chat(messages, template=given, **ANSWER)
        counts, total = reply.plan.counts, len(reply.plan.prompt)
        if turn in SHOWN:
            computed = counts.new + counts.recomputed
            rows.append([str(n) for n in (turn, total, total - held, counts.exact, counts.approximate, computed)])
        held = total + len(reply.segment)
        messages.append({"role": "assistant", "content": thought_first(reply.text) if thinking else reply.text})
    return rows


def thought_first(answer: str) -> str:
    """The answer as if the first half of its words had been a thought."""
    words = answer.split()
    half = len(words) // 2
    return f"<think>\n{' '.join(words[:half])}\n</think>\n\n{' '.join(words[half:])}"


def catalogue(model: Any, tokenizer: Any, canonical: bool) -> list[list[str]]:
    """A row for each change: tokens of the prompt, of segments never seen, exact, approximate, recomputed, and with the
    policy's own limit, beyond which it computes everything behind the exact head.
    """
    engine = Engine(model, tokenizer, policy=POLICY, weights="the same in all engines here")
    talk = [
        {"role": "system", "content": "You are the assistant of a small travel agency."},
        {"role": "user", "content": "What will the weather be like in Lisbon when our guests arrive on Friday?"},
    ]
    options: dict[str, Any] = {"canonical": canonical, "template": {"chat_template": CHATML_TOOLS}, "max_new_tokens": 1}
    engine.chat(talk, list(CATALOGUE), **options)
    rows = []
    for change, tools in changes().items():
        ungated = Balanced(gate=False, learn_first=0, dense_above=1.0)
        reply = engine.fork(policy=ungated).chat(talk, tools, **options)
        gated = engine.fork().chat(talk, tools, **options).plan.counts
        counts = reply.plan.counts
        cells = (counts.total, _never_seen(reply), counts.exact, counts.approximate, counts.recomputed)
        rows.append([change, *map(str, cells), str(gated.new + gated.recomputed)])
    return rows


def _never_seen(reply: Reply) -> int:
    return sum(part.stop - part.start for part in reply.plan.parts if part.action == "new")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All tables by name."""
    model, tokenizer = load(None)
    turns = ("turn", "prompt", "since the last call", "exact", "approximate", "computed")
    tools = ("change", "prompt", "never seen", "exact", "approximate", "recomputed", "computed with the limit")
    talks = {
        "turns": (None, False, False),
        "turns-thinking": (THINKING, True, False),
        "turns-date": (DATED_TOOLS, False, True),
    }
    found = {name: table(turns, conversation(model, tokenizer, *how)) for name, how in talks.items()}
    for name, canonical in (("tools-canonical", True), ("tools-as-given", False)):
        found[name] = table(tools, catalogue(model, tokenizer, canonical))
    return found


def replaced(text: str, found: dict[str, str]) -> str:
    """The document with each table between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    for name, made in found.items():
        begin, end = f"<!-- {name}: python -m benchmarks.chat -->\n", f"\n<!-- end of {name} -->"
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = head + begin + made + end + tail
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    check = parser.parse_args().check
    text = DOC.read_text(encoding="utf-8")
    found = tables()
    print("\n\n".join(f"{name}\n{made}" for name, made in found.items()))
    made = replaced(text, found)
    if check and made != text:
        raise SystemExit("docs/chat.md has other tables: run python -m benchmarks.chat")
    if not check:
        DOC.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
