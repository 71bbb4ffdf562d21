"""kvcomm itself in the peers' harness, for the same prompts in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata

from eval.peers.base import Answer
from eval.running.setting import Setting
from kvcomm import Dense, Engine
from kvcomm.reuse.prompt import Prompt


@dataclass(frozen=True)
class Ours:
    """With its default policy, learning as it goes."""

    @property
    def name(self) -> str:
        """As it is reported."""
        return "kvcomm"

    @contextmanager
    def run(self, setting: Setting) -> Iterator[_Running]:
        """A new engine."""
        yield _Running(setting.engine())


@dataclass(frozen=True)
class _Running:
    engine: Engine
    version: str = metadata.version("kvcomm")

    def answer(self, prompt: Prompt, tokens: int, reuse: bool) -> Answer:
        """See Running; the dense runs leave nothing behind."""
        engine = self.engine if reuse else self.engine.fork(policy=Dense(), learn=False)
        reply = engine.generate(prompt, max_new_tokens=tokens, do_sample=False)
        counts = reply.plan.counts
        return Answer(reply.ttft_s, reply.token_ids, counts.exact + counts.approximate)
