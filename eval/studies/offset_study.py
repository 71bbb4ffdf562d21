"""``python -m eval offsets``: how much of the true offsets each estimator explains, on problems not learned from.

Cheaper and finer than closeness: no answer is compared, only KV. Every variant sees the same observations: KV of texts
as they were captured, and as a dense prefill has them where they are used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from eval.files.output import command_line, require_writable, write_json
from eval.files.progress import stderr_console
from eval.methods.registry import METHODS
from eval.running.setting import Setting
from eval.tasks import make_task
from eval.trial import Trial
from kvcomm.anchors.book import Observation, OffsetBook
from kvcomm.anchors.statistics import bucket_of

app = typer.Typer(
    help="How much of the true offsets is explained.", add_completion=False, pretty_exceptions_enable=False
)
SHORT = 64
"""Token index up to which the variant that never saw a long segment learns."""


class Recorder(OffsetBook):
    """Keeps every observation, and learns nothing."""

    seen: list[Observation]

    def learn(self, observations: Sequence[Observation]) -> None:
        self.seen = [*getattr(self, "seen", []), *observations]


@dataclass(frozen=True)
class Tokens:
    """Observed tokens of one layer.

    Attributes:
        x, y: base and offset, [tokens, heads, 2 * head_dim] float32.
        before: base of the token before, zero for a segment's first.
        word: layer 0's keys and values, all heads: the token itself, [tokens, heads * 2 * head_dim].
        place: number of the pair; index: token index in its segment.
    """

    x: torch.Tensor
    y: torch.Tensor
    before: torch.Tensor
    word: torch.Tensor
    place: torch.Tensor
    index: torch.Tensor

    def where(self, mask: torch.Tensor) -> Tokens:
        """Those of ``mask``."""
        return Tokens(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))


Features = Callable[[Tokens, int], torch.Tensor]
Groups = Callable[[Tokens], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A linear estimator.

    Attributes:
        features: of a KV head's tokens, [tokens, features]; None for the mean alone.
        groups: tokens that share a mean.
        ridge: as LinearOffset's.
        rank: of the map, if it is cut.
        short: whether only tokens up to SHORT are learned from.
    """

    about: str
    features: Features | None
    groups: Groups
    ridge: float = 0.03
    rank: int | None = None
    short: bool = False


def _bucket(tokens: Tokens) -> torch.Tensor:
    return tokens.place * 100 + bucket_of(tokens.index)


def _clipped(tokens: Tokens) -> torch.Tensor:
    return tokens.place * 100 + bucket_of(tokens.index.clamp_max(SHORT))


def _own(tokens: Tokens, head: int) -> torch.Tensor:
    return tokens.x[:, head]


def _joined(*others: Callable[[Tokens, int], torch.Tensor]) -> Features:
    return lambda tokens, head: torch.cat([_own(tokens, head), *(other(tokens, head) for other in others)], dim=1)


def _rounded(tokens: Tokens, head: int) -> torch.Tensor:
    x = tokens.x[:, head]
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round() * scale


VARIANTS: dict[str, Variant] = {
    "mean": Variant("mean of the pair and bucket", None, _bucket),
    "linear": Variant("the default: own head's [K, V], one map for all pairs", _own, _bucket),
    "ridge ÷ 10": Variant("ridge 0.003", _own, _bucket, ridge=0.003),
    "ridge × 10": Variant("ridge 0.3", _own, _bucket, ridge=0.3),
    "all heads": Variant("[K, V] of all heads of the layer", lambda t, head: t.x.flatten(1), _bucket),
    "token": Variant("own head and the token itself (layer 0)", _joined(lambda t, head: t.word), _bucket),
    "token before": Variant("own head of this token and the one before", _joined(lambda t, h: t.before[:, h]), _bucket),
    "rank 16": Variant("the map cut to rank 16", _own, _bucket, rank=16),
    "8 bits": Variant("bases rounded to 8 bits a head and token", _rounded, _bucket),
    "a mean an index": Variant("mean of the pair and token index", _own, lambda t: t.place * 4096 + t.index),
    "a mean a pair": Variant("mean of the pair alone", _own, lambda t: t.place),
    "one mean": Variant("mean of the bucket over all pairs", _own, lambda t: bucket_of(t.index)),
    "short only": Variant(
        f"learned from tokens up to index {SHORT} alone; later ones share the last bucket's mean",
        _own,
        _clipped,
        short=True,
    ),
}


def predict(variant: Variant, seen: Tokens, asked: Tokens) -> torch.Tensor:
    """Offsets of ``asked`` learned from ``seen``, shaped as ``asked.y``; a group never seen takes the mean of all."""
    if variant.short:
        seen = seen.where(seen.index <= SHORT)
    out = torch.empty_like(asked.y)
    groups, at = torch.unique(torch.cat([variant.groups(seen), variant.groups(asked)]), return_inverse=True)
    mine, theirs = at[: len(seen.index)], at[len(seen.index) :]
    counts = torch.zeros(len(groups)).index_add_(0, mine, torch.ones(len(mine)))
    for head in range(seen.y.shape[1]):
        y = seen.y[:, head]
        means = _means(y, mine, counts)
        if variant.features is None:
            out[:, head] = means[theirs]
            continue
        x, new = variant.features(seen, head), variant.features(asked, head)
        centres = _means(x, mine, counts)
        dx, dy = x - centres[mine], y - means[mine]
        xx = dx.T @ dx
        weights = torch.linalg.solve(xx + variant.ridge * xx.diagonal().mean() * torch.eye(len(xx)), dx.T @ dy)
        if variant.rank is not None:
            u, s, v = torch.linalg.svd(weights, full_matrices=False)
            weights = u[:, : variant.rank] * s[: variant.rank] @ v[: variant.rank]
        out[:, head] = means[theirs] + (new - centres[theirs]) @ weights
    return out


def _means(values: torch.Tensor, groups: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(len(counts), values.shape[1]).index_add_(0, groups, values)
    return torch.where((counts > 0)[:, None], sums / counts.clamp_min(1)[:, None], values.mean(0))


@app.command()
def offsets(
    task: Annotated[str, typer.Option(help="Kind of text.")] = "humaneval",
    topology: Annotated[str, typer.Option(help="Who hears whom.")] = "full",
    problems: Annotated[int, typer.Option(help="Problems to learn from.")] = 8,
    held_out: Annotated[int, typer.Option(help="Other problems to predict.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the last agent's prompt.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Chooses problems and documents.")] = 0,
    model: Annotated[str | None, typer.Option(help="HuggingFace id or folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("results/offsets.json"),
) -> None:
    """Learn from some problems and predict the offsets of others, in every way, in six layers of the model."""
    require_writable(out)
    trial = Trial(topology, 5, 1, problems + held_out, prompt_tokens, answer_tokens, 1, seed, "generate")
    setting = Setting.load(model)
    bench = trial.prepare(setting, make_task(task).problems(), {"dense": METHODS["dense"]})
    recorder = Recorder(bench.engine.pool.fingerprint)
    bench.engine.book = recorder
    layers = sorted({round(n * (recorder.statistics.layers - 1) / 5) + 1 for n in range(6)})
    with Progress(console=stderr_console()) as progress:
        nodes = len(bench.workload.nodes)
        step = progress.add_task("observing", total=(problems + held_out) * nodes)
        first = 0
        for number, _ in enumerate(bench.learn(), start=1):
            progress.advance(step)
            if number == problems * nodes:
                first = len(recorder.seen)
        step = progress.add_task("predicting", total=len(layers) * len(VARIANTS))
        found: dict[str, dict[str, list[torch.Tensor]]] = {name: {} for name in VARIANTS}
        for layer in layers:
            seen, asked = (_tokens(recorder.seen[a:b], layer) for a, b in ((0, first), (first, None)))
            for name, variant in VARIANTS.items():
                _add(found[name], predict(variant, seen, asked), asked)
                progress.advance(step)
    shares = {name: {"about": VARIANTS[name].about, **_shares(sums)} for name, sums in found.items()}
    write_json(
        out,
        {
            **setting.describe(),
            "command": command_line("offsets"),
            "setting": {"task": task, "topology": topology, "problems": problems, "held_out": held_out, "seed": seed},
            "layers": layers,
            "explained": shares,
        },
    )
    for name, share in shares.items():
        print(f"{name:16} keys {share['keys']:6.1%}  values {share['values']:6.1%}  beyond {SHORT} {share['far']:6.1%}")


def _tokens(seen: Sequence[Observation], layer: int) -> Tokens:
    columns: list[list[torch.Tensor]] = [[] for _ in range(6)]
    for one in seen:
        base, true = (torch.cat([kv.keys, kv.values], dim=-1).transpose(1, 2).float() for kv in (one.base, one.true))
        x = base[layer]
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        place = torch.full((len(x),), zlib.crc32(str(one.pair).encode()))  # the same in every set of observations
        row = (x, true[layer] - x, before, base[0].flatten(1), place, torch.arange(len(x)))
        for column, part in zip(columns, row, strict=True):
            column.append(part)
    return Tokens(*(torch.cat(column) for column in columns))


def _add(sums: dict[str, list[torch.Tensor]], predicted: torch.Tensor, asked: Tokens) -> None:
    keys, values = (slice(0, asked.y.shape[2] // 2), slice(asked.y.shape[2] // 2, None))
    far = asked.index > SHORT
    for name, p, y in (
        ("keys", predicted[..., keys], asked.y[..., keys]),
        ("values", predicted[..., values], asked.y[..., values]),
        ("far", predicted[far], asked.y[far]),
    ):
        unit = asked.y.square().mean().clamp_min(1e-30)  # layers count alike
        sums.setdefault(name, []).append(torch.stack([(p - y).square().sum() / unit, y.square().sum() / unit]))


def _shares(sums: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    totals = {name: torch.stack(parts).sum(0) for name, parts in sums.items()}
    return {name: float(1 - left / whole) if float(whole) else 0.0 for name, (left, whole) in totals.items()}
