"""The demo's page: what was gained, what it cost, and every number behind that."""

from __future__ import annotations

from eval.demo.result import DemoResult
from eval.demo.words import plain_words
from eval.pages.page import facts, figures, page, table, tiles, word_columns
from eval.pages.quantities import nats, percent, seconds, times
from eval.pages.svg import Bar, grouped_bars, legend, log_dots, stacked_bars

_WAYS = (("c-dense", "dense: full prefill"), ("c-exact", "exact: equal prefixes only"), ("c-reused", "reused: kvcomm"))
_KINDS = (
    ("c-exact", "exact"),
    ("c-approximate", "approximate"),
    ("c-recomputed", "recomputed"),
    ("c-new", "new"),
)
_COLUMNS = (
    "Agent", "Prompt tokens", "TTFT dense", "TTFT exact", "TTFT reused", "Speed-up", "Exact", "Approxi­mate",
    "Recom­puted", "New", "First token", "Mean KL, nats", "Top-1",
)  # fmt: skip


def demo_page(result: DemoResult) -> str:
    """The HTML document for ``result``."""
    words = plain_words(result)
    count = len(result.agents)
    lead = f"{count} agents on {_short(result.model)}, each hearing all earlier ones"
    lead += f"; {result.problems} problem{'s' if result.problems > 1 else ''} measured" if result.problems else ""
    lead += ". Reused and dense runs see the same token ids; all costs of reuse are inside the times."
    columns = (("What was gained", words.gained), ("What it cost", words.cost), ("What to try next", words.next))
    return page(
        "kvcomm: how much sooner agents answer when they share KV",
        lead,
        [
            _tiles(result),
            word_columns(columns),
            figures([_ttft(result), _tokens(result), _closeness(result), *_workflow(result)]),
            _table(result),
            _facts(result),
        ],
    )


def _short(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def _tiles(result: DemoResult) -> str:
    last = result.agents[-1]
    yardstick = result.yardstick.get("mean_kl", 0.0)
    return tiles(
        [
            (times(last.speedup), f"sooner to the first token of {last.name}", "against a full prefill"),
            (percent(result.reused), "of prompt tokens reused", "exactly or approximately, from agent 2 on"),
            (
                nats(result.mean("mean_kl")),
                "nats mean KL from dense",
                f"rounding to bfloat16: {nats(yardstick)}" if yardstick else "0 is the same distribution",
            ),
            (percent(result.mean("top1_agreement")), "same most likely token", "along the dense answers"),
        ]
    )


def _ttft(result: DemoResult) -> tuple[str, str, str]:
    groups = []
    for agent in result.agents:
        values = (agent.ttft_dense_s, agent.ttft_exact_s, agent.ttft_s)
        bars = [Bar(css, value, seconds(value)) for (css, _), value in zip(_WAYS, values, strict=True)]
        bars[-1] = Bar("c-reused", agent.ttft_s, f"{seconds(agent.ttft_s)} · {times(agent.speedup)}")
        groups.append((f"{agent.name} ({agent.prompt_tokens:.0f} tokens)", bars))
    plot = legend(_WAYS) + grouped_bars("Time to first token for each agent", groups)
    return "Time to first token", plot, "Medians. The factor is dense over reused."


def _tokens(result: DemoResult) -> tuple[str, str, str]:
    rows = []
    for agent in result.agents:
        counts = (agent.tokens.exact, agent.tokens.approximate, agent.tokens.recomputed, agent.tokens.new)
        parts = [Bar(css, n, f"{n:.0f} {name}") for (css, name), n in zip(_KINDS, counts, strict=True)]
        rows.append((agent.name, parts, f"{percent(agent.reused)} reused"))
    plot = legend(_KINDS) + stacked_bars("Prompt tokens by what was done for them", rows)
    caption = "Exact and approximate tokens were not computed in this call; recomputed and new ones were."
    return "Where each prompt token came from", plot, caption


def _closeness(result: DemoResult) -> tuple[str, str, str]:
    rows = [(a.name, a.mean_kl, f"{nats(a.mean_kl)} · top-1 {percent(a.top1_agreement)}") for a in result.agents]
    yardstick = result.yardstick.get("mean_kl", 0.0)
    reference = (f"bfloat16 rounding: {nats(yardstick)}", yardstick) if yardstick else None
    plot = log_dots("Mean KL divergence from a full prefill for each agent, log axis", rows, reference)
    caption = "Mean KL (dense ‖ reused) in nats along the dense answer, log axis; left is closer; hollow: rounding."
    return "Closeness to a full prefill", plot, caption


def _workflow(result: DemoResult) -> list[tuple[str, str, str]]:
    ways = [(css, name, result.workflow_s.get(name, 0.0)) for css, name in zip(
        ("c-dense", "c-exact", "c-reused"), ("dense", "exact", "reused"), strict=True)]  # fmt: skip
    groups = [(name, [Bar(css, value, seconds(value))]) for css, name, value in ways if value > 0]
    if not groups:
        return []
    caption = "All agents from the first call to the last answer, decoding included: no cost can hide outside."
    return [("Wall time of the whole workflow", grouped_bars("Wall time of the workflow", groups), caption)]


def _table(result: DemoResult) -> str:
    rows = [
        (
            agent.name,
            f"{agent.prompt_tokens:.0f}",
            *(f"{value:.3f} s" for value in (agent.ttft_dense_s, agent.ttft_exact_s, agent.ttft_s)),
            times(agent.speedup),
            *(f"{n:.0f}" for n in (t.exact, t.approximate, t.recomputed, t.new)),
            percent(agent.first_token_agreement),
            nats(agent.mean_kl),
            percent(agent.top1_agreement),
        )
        for agent in result.agents
        for t in (agent.tokens,)
    ]
    note = (
        "TTFT runs from the call with text in hand to the first token, with tokenising, matching, moving and "
        "recomputing inside. First token and top-1: share that agrees with the dense run. Agent 1 hears nobody and is "
        "outside the means above."
    )
    return table("All numbers", _COLUMNS, rows, note)


def _facts(result: DemoResult) -> str:
    entries = [("Model", _short(result.model)), ("SHA-256 of the weights", result.model_digest)]
    optional = (
        ("Policy", result.policy),
        ("Problems", result.problems),
        ("Repeats of each timing", result.repeats),
        ("Tokens an answer, at most", result.max_new_tokens),
        ("Machine", result.machine),
    )
    entries += [(name, str(value)) for name, value in optional if value]
    entries += [("Threads", str(result.threads)), ("Seed", str(result.seed))]
    entries += [(name, str(version)) for name, version in result.versions.items()]
    return facts("How to repeat it", entries, result.command)
