"""What is measured under each name: cells of a task in a topology, with the methods that are compared in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.methods.registry import METHODS
from eval.tasks import TASKS
from eval.topologies import TOPOLOGIES
from eval.topologies.trading import AGENTS, ROUNDS
from eval.trial import Trial
from kvcomm.errors import InvalidInput

BASELINES = ("dense", "exact", "kvcomm")
FEW = ("dense", "exact", "rerotate", "leading", "kvcomm")
READERS = ("dense", "exact", "rerotate", "leading", "deviation", "attended", "kvcomm")


@dataclass(frozen=True)
class Cell:
    """A task in a topology.

    Attributes:
        trial: sizes; ``own_answers`` makes each method write the last call's answer, which is scored.
        every_call: take TTFT of every call; otherwise of the last one, and the first call is run once for all methods.
    """

    task: str
    trial: Trial
    methods: tuple[str, ...]
    every_call: bool = False

    @property
    def name(self) -> str:
        """The cell's name, the same in every run of the preset; a user's own task goes by its file's name."""
        return f"{Path(self.task).name}, {self.trial.topology}"

    @property
    def cost(self) -> float:
        """How long it takes, in units of its own: for the time left."""
        trial, desk = self.trial, self.trial.topology == "trading"
        calls = 22 * trial.rounds if desk else trial.agents * trial.rounds
        timed = len(self.methods) * trial.repeats * (calls if self.every_call else 1)
        own = len(self.methods) * trial.answer_tokens / 64 if trial.own_answers else 0
        measured = trial.prompts * (calls * (len(self.methods) + 2) + timed + own)
        filled = trial.fill_prompts * calls * (2.0 if trial.fill_by == "generate" else 1.0)
        return trial.prompt_tokens * (measured + filled)


def _trial(topology: str = "full", rounds: int = 1, own_answers: bool = True, **sizes: int) -> Trial:
    given = {"agents": 3, "prompts": 4, "fill_prompts": 6, "prompt_tokens": 1000, "answer_tokens": 48, "repeats": 2}
    return Trial(topology, **{**given, **sizes}, seed=0, fill_by="generate", rounds=rounds, own_answers=own_answers)


def quick() -> tuple[Cell, ...]:
    """Does everything run, and what does it look like? Tools, a reader and a debate, four prompts each."""
    small = {"prompts": 4, "fill_prompts": 2, "prompt_tokens": 600, "answer_tokens": 12, "repeats": 1}
    return (
        Cell("tools", _trial(own_answers=False, **small), FEW),
        Cell("needle", _trial("independent", **{**small, "agents": 2, "answer_tokens": 20}), FEW),
        Cell("needle", _trial("debate", own_answers=False, **small), BASELINES, every_call=True),
    )


def standard() -> tuple[Cell, ...]:
    """Every method on every task, fully connected; a reader's score; every topology on one task; the trading desk."""
    tasks = tuple(Cell(task, _trial(), tuple(METHODS)) for task in TASKS)
    reader = _trial("independent", agents=2, prompts=12, answer_tokens=32, repeats=1)
    patterns = tuple(
        Cell(
            "documents",
            _trial(name, rounds=2 if name == "debate" else 1, agents=4, own_answers=False, prompts=3, fill_prompts=4,
                   answer_tokens=32, repeats=1),
            BASELINES,
            every_call=True,
        )
        for name in TOPOLOGIES
        if name not in ("full", "independent", "trading")
    )  # fmt: skip
    desk = _trial("trading", rounds=ROUNDS, agents=AGENTS, own_answers=False, prompts=1, fill_prompts=1,
                  prompt_tokens=700, answer_tokens=16, repeats=1)  # fmt: skip
    return (*tasks, Cell("needle", reader, READERS), *patterns, Cell("documents", desk, BASELINES, every_call=True))


def paper() -> tuple[Cell, ...]:
    """KVCOMM's published shape: 2 to 5 agents fully connected, 1K input, 512 tokens a message.

    Its counts of problems are bounded by real text: each case has 1K tokens of documents that no other case has.
    """
    cells = []
    for task in TASKS:
        for agents in (2, 3, 4, 5):
            trial = _trial(agents=agents, prompts=30, fill_prompts=14, answer_tokens=512, repeats=3,
                           prompt_tokens=1024 + 512 * (agents - 1))  # fmt: skip
            cells.append(_Sized(task, trial, tuple(METHODS)))
    return tuple(cells)


@dataclass(frozen=True)
class _Sized(Cell):
    """A cell whose topology occurs in several sizes."""

    @property
    def name(self) -> str:
        """The cell's name with its number of agents."""
        return f"{self.task}, {self.trial.topology}, {self.trial.agents} agents"


def paper_smoke() -> tuple[Cell, ...]:
    """Does every cell of ``paper`` run? Its shapes, with one prompt, one to learn from, and nothing scored."""
    once: dict[str, Any] = {"prompts": 1, "fill_prompts": 1, "repeats": 1, "own_answers": False}
    return tuple(replace(cell, trial=replace(cell.trial, **once)) for cell in paper())


PRESETS = {"quick": quick, "standard": standard, "paper": paper, "paper-smoke": paper_smoke}


def preset(name: str, seed: int = 0) -> tuple[Cell, ...]:
    """The cells of a preset, with problems and documents that ``seed`` chooses.

    Raises:
        InvalidInput: there is no such preset.
    """
    if name not in PRESETS:
        raise InvalidInput(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return tuple(replace(cell, trial=replace(cell.trial, seed=seed)) for cell in PRESETS[name]())
