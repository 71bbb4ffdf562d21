"""What the demo's numbers mean, in plain words: for the last lines in the terminal and the top of the page."""

from __future__ import annotations

from dataclasses import dataclass

from eval.demo.result import DemoResult
from eval.pages.quantities import nats, percent, seconds, times

CLOSE_KL = 0.05
COMPARE = (
    "python -m eval run --task humaneval --topology full --agents 5 --methods dense,exact,rerotate,leading,kvcomm "
    "--prompts 4 --prompt-tokens 1500 --out results/run.json"
)


@dataclass(frozen=True)
class Words:
    """Sentences under three headings."""

    gained: list[str]
    cost: list[str]
    next: list[str]


def plain_words(result: DemoResult) -> Words:
    """Sentences for ``result``; what was lost is said as plainly as what was gained."""
    last = result.agents[-1]
    gained = [_sooner("a full prefill", last.name, last.ttft_dense_s, last.ttft_s)]
    if last.ttft_exact_s > 0:
        gained.append(_sooner("reuse of equal prefixes alone", last.name, last.ttft_exact_s, last.ttft_s))
    who = f"agents 2 to {len(result.agents)}" if len(result.agents) > 1 else "the agent"
    gained.append(f"{percent(result.reused)} of the prompt tokens of {who} were reused and not computed again.")
    dense, reused = result.workflow_s.get("dense", 0.0), result.workflow_s.get("reused", 0.0)
    if dense > 0 and reused > 0:
        gained.append(f"The whole workflow took {seconds(reused)}, answers included; dense it took {seconds(dense)}.")
    return Words(gained, _cost(result), _next(result))


def _sooner(than: str, name: str, before: float, after: float) -> str:
    if after < before:
        factor = times(before / after).rstrip("×")
        return f"First token of {name}: {seconds(after)}, {factor} times sooner than with {than} ({seconds(before)})."
    return f"First token of {name}: {seconds(after)}, no sooner than with {than} ({seconds(before)})."


def _cost(result: DemoResult) -> list[str]:
    kl, top1, first = (result.mean(name) for name in ("mean_kl", "top1_agreement", "first_token_agreement"))
    if kl <= 0:
        return ["Nothing measurable: the model's distributions were those of a full prefill."]
    said = [f"The model's distributions moved by {nats(kl)} nats (mean KL divergence from a full prefill)."]
    yardstick = result.yardstick.get("mean_kl", 0.0)
    if yardstick > 0:
        scale = f"computing in bfloat16 moves them by {nats(yardstick)}"
        said.append(f"For scale: {scale}; this is {kl / yardstick:.2g} times that.")
    said.append(
        f"The first token was the dense one in {percent(first)} of the answers; along the dense answers the most "
        f"likely token was the same at {percent(top1)} of the positions."
    )
    return said


def _next(result: DemoResult) -> list[str]:
    said = []
    if result.mean("mean_kl") > CLOSE_KL:
        said.append("Closer: policy=Exact() reuses only what is exact; recomputing more of each segment lies between.")
    elif result.agents[-1].speedup < 2.5:
        said.append("Sooner: longer shared texts gain more, because what is computed again stays the same.")
    else:
        said.append("Sooner still: policy=Fast() recomputes nothing; look at what that costs before you keep it.")
    said.append(f"Compare with other methods: {COMPARE}")
    said.append("Your own model: add --model with a HuggingFace id or a folder.")
    return said


def as_text(words: Words) -> str:
    """The words as lines for a terminal."""
    parts = (("What was gained", words.gained), ("What it cost", words.cost), ("What to try next", words.next))
    return "\n".join(f"{title}\n" + "\n".join(f"  - {line}" for line in lines) for title, lines in parts)
