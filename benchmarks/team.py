"""The published shape: agents that hear all before them, a prefix of their own, one task, messages of real text."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.common import RealText, Size
from eval.running.setting import Setting
from eval.topologies import full
from kvcomm import Engine, Segment, Slot, System
from kvcomm.hf.template import Template


@dataclass(frozen=True)
class Case:
    """A task, and what each agent says to it."""

    task: str
    messages: dict[str, Segment]


@dataclass(frozen=True)
class Team:
    """Agents on an engine, cases to learn from and others to measure; no two share any text.

    Attributes:
        names: the agents in order; each hears all before it.
    """

    engine: Engine
    names: tuple[str, ...]
    learned: tuple[Case, ...]
    measured: tuple[Case, ...]
    size: Size
    text: RealText = field(repr=False)

    @classmethod
    def build(cls, setting: Setting, size: Size) -> Team:
        """Register the agents and cut the texts; nothing is run."""
        engine, text = setting.engine(), RealText(setting.tokenizer)
        nodes = full(size.agents, 0)
        for node in nodes:
            system = text.segment(size.prefix)
            kept = size.prefix
            while True:  # what the chat template puts around it belongs to the prefix
                said = f"You are the {node.name}. {setting.tokenizer.decode(list(system.token_ids[:kept]))}"
                parts: list[System | Slot | str] = [System(said), *node.template()[1:]]
                excess = len(Template(node.name, parts, setting.tokenizer).fixed[0]) - size.prefix
                if excess <= 0 or kept <= 1:
                    break
                kept = max(kept - excess, 1)
            engine.agent(node.name, parts)
        names = tuple(node.name for node in nodes)

        def case() -> Case:
            task = text.text(size.task)
            return Case(task, {name: text.segment(size.message) for name in names})

        learned = tuple(case() for _ in range(size.learned))
        return cls(engine, names, learned, tuple(case() for _ in range(size.close)), size, text)

    def slots(self, case: Case, name: str) -> dict[str, str | Segment]:
        """Values for the slots of an agent: the task as text, messages as replies hand them over, as token ids."""
        heard = self.names[: self.names.index(name)]
        return {"task": case.task, **{other: case.messages[other] for other in heard}}

    def learn(self) -> None:
        """Let the engine see the learned cases, each agent with its message."""
        for case in self.learned:
            for name in self.names:
                self.engine.agents[name].study(answer=case.messages[name], **self.slots(case, name))
