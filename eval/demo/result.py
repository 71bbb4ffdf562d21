"""What the demo measured: results/demo.json as values, checked when read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.files.output import write_json
from eval.files.reading import read_file, strict_json
from kvcomm.errors import InvalidInput


@dataclass(frozen=True)
class Tokens:
    """A prompt's tokens by what was done for them; they add up to the prompt."""

    exact: float
    approximate: float
    recomputed: float
    new: float

    @property
    def total(self) -> float:
        """All tokens of the prompt."""
        return self.exact + self.approximate + self.recomputed + self.new


@dataclass(frozen=True)
class AgentRow:
    """One agent's figures: medians of seconds and of counts, means of closeness, over the problems measured."""

    name: str
    prompt_tokens: float
    ttft_dense_s: float
    ttft_exact_s: float
    ttft_s: float
    tokens: Tokens
    first_token_agreement: float
    mean_kl: float
    top1_agreement: float

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came than after a dense prefill."""
        return self.ttft_dense_s / self.ttft_s if self.ttft_s > 0 else math.inf

    @property
    def reused(self) -> float:
        """Share of the prompt's tokens that were reused, exactly or approximately."""
        return (self.tokens.exact + self.tokens.approximate) / self.tokens.total if self.tokens.total else 0.0


@dataclass(frozen=True)
class DemoResult:
    """All that the page shows. The fields behind ``agents`` may be left out.

    Attributes:
        code: SHA-256 hex digest of the code, of ``eval.running.setting.code_digest``.
        workflow_s: wall time of all agents, keys among dense, exact, reused.
        yardstick: mean_kl and top1_agreement of dense bfloat16 against dense float32.
    """

    model: str
    model_digest: str
    threads: int
    versions: Mapping[str, str]
    seed: int
    agents: Sequence[AgentRow]
    policy: str = ""
    command: str = ""
    problems: int = 0
    repeats: int = 0
    max_new_tokens: int = 0
    machine: str = ""
    code: str = ""
    workflow_s: Mapping[str, float] = field(default_factory=dict)
    yardstick: Mapping[str, float] = field(default_factory=dict)

    @property
    def hearing(self) -> Sequence[AgentRow]:
        """The agents from the second on, over whom reuse and closeness are averaged; the only one if there is one."""
        return self.agents[1:] or self.agents

    @property
    def reused(self) -> float:
        """Mean share of reused tokens over ``hearing``."""
        return fmean(agent.reused for agent in self.hearing)

    def mean(self, figure: str) -> float:
        """Mean of one of AgentRow's figures over ``hearing``."""
        return fmean(getattr(agent, figure) for agent in self.hearing)

    def write(self, path: Path) -> None:
        """Write the JSON file, its folder made if needed."""
        write_json(path, asdict(self))


_SHARES = {"first_token_agreement", "top1_agreement"}
_DURATIONS = {"ttft_dense_s", "ttft_s"}
_MOST, _SHORTEST_S = 1e15, 1e-9


def _fill(kind: type[Any], data: object, where: str) -> dict[str, Any]:
    """Arguments of ``kind`` out of ``data``: numbers finite and not negative, texts texts; unknown keys are ignored."""
    if not isinstance(data, dict):
        raise InvalidInput(f"{where} is {type(data).__name__}, an object is needed; run the demo again")
    filled = {}
    for item in fields(kind):
        place = f"{where}.{item.name}"
        if item.name not in data:
            if kind is DemoResult and item.name in _OPTIONAL:
                continue
            raise InvalidInput(f"{place} is missing; run the demo again")
        value = data[item.name]
        if item.type in ("float", "int"):
            limit = 1.0 if item.name in _SHARES else _MOST
            _check_number(value, place, limit, _SHORTEST_S if item.name in _DURATIONS else -1e-6)
        elif item.type == "str":
            _check_text(value, place)
        filled[item.name] = value
    return filled


_OPTIONAL = {item.name for item in fields(DemoResult)[6:]}


def _check_number(value: object, place: str, limit: float = _MOST, least: float = -1e-6) -> None:
    """A mean of divergences can fall below zero by rounding."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= limit:
        raise InvalidInput(f"{place} is {value!r:.60}, a number between {max(least, 0.0):g} and {limit:g} is needed")


def _check_text(value: object, place: str) -> None:
    if not isinstance(value, str):
        raise InvalidInput(f"{place} is {value!r:.60}, a text is needed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{place} is {value!r:.60}, half a surrogate pair is no text") from None


def demo_result(data: object) -> DemoResult:
    """The values in ``data``, parsed JSON.

    Raises:
        InvalidInput: something needed is missing, null, negative or of another type; the message says where.
    """
    top = _fill(DemoResult, data, "demo")
    if not isinstance(top["agents"], list) or not top["agents"]:
        raise InvalidInput("demo.agents must be a list of at least one agent")
    agents = []
    for number, entry in enumerate(top["agents"]):
        row = _fill(AgentRow, entry, f"demo.agents[{number}]")
        agents.append(AgentRow(**{**row, "tokens": Tokens(**_fill(Tokens, row["tokens"], f"{row['name']}.tokens"))}))
    for name in ("versions", "workflow_s", "yardstick"):
        entries = top.get(name, {})
        if not isinstance(entries, dict):
            raise InvalidInput(f"demo.{name} is {entries!r:.60}, an object is needed")
        for key, value in entries.items():
            _check_text(key, f"a name in demo.{name}")
            (_check_text if name == "versions" else _check_number)(value, f"demo.{name}.{key}")
    return DemoResult(**{**top, "agents": tuple(agents)})


def read_demo(path: Path) -> DemoResult:
    """The demo's results in a file.

    Raises:
        InvalidInput: the file is absent, is not JSON or lacks what the page needs.
    """
    try:
        return demo_result(strict_json(read_file(path, "a results file of `python -m eval demo`")))
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} cannot be read ({error}); make it with: python -m eval demo") from None
